"""The kinds of log records that brine-confd.catalog explains."""

import logging

from brine.common.message import NOTICE, Message

CONFIG_LOADED = Message("4487d7df7e7f425f9f49137b04942f17", "config-loaded", logging.INFO)
CONFIG_REFUSED = Message("11cc688a6cd7427698961f4c2fe4aff2", "config-refused", logging.ERROR)
NO_CONFIG = Message("1f06df830be34eaa811f5aba9cc7bb58", "no-config", logging.WARNING)
KEYS_LOADED = Message("a8f336b89afb41a0a75e288c60b0d516", "keys-loaded", NOTICE)
KEYS_SHORT = Message("c1debd39f6cd4b18b220d98335a9b7e1", "keys-short", logging.WARNING)
KEYS_REFUSED = Message("aea2285d982c419baaefbc821aac0ea1", "keys-refused", logging.ERROR)
WORKER_LOST = Message("98afcae0a56c4fa7930d8dc0c50ba221", "worker-lost", logging.ERROR)
WORKER_STUCK = Message("0d39dd596ffa453c9746de287c0cc68e", "worker-stuck", logging.ERROR)
REFUSED_DATAGRAMS = Message("21ea58ea9def4cb5a090898dac8018a0", "refused-datagrams", NOTICE)
PORT_TAKEN = Message("ce723799a4694db59b721e3c68ca1ee3", "port-taken", logging.ERROR)
