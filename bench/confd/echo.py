"""`python3 -m bench.confd.echo PORT`: sends every datagram back to where it came from."""

import socket
import sys

_LONGEST = 65536


def main() -> None:
    """Serve until killed."""
    buffer = memoryview(bytearray(_LONGEST))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", int(sys.argv[1])))
        while True:
            size, source = server.recvfrom_into(buffer)
            server.sendto(buffer[:size], source)


if __name__ == "__main__":
    main()
