"""The packages of saltext-brine: Salt's loader looks in folders without the _ of a file root."""

from pathlib import Path

from setuptools import setup

FOLDERS = {f"saltext.brine.{folder.name[1:]}": str(folder) for folder in Path("states").glob("_*")}

setup(packages=list(FOLDERS), package_dir=FOLDERS)
