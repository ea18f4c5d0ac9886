"""In-tree PEP 517 backend: setuptools' own, except that torch is asked for only when it cannot be seen.

Under build isolation pip runs this in a bare environment, but `sysconfig` still answers for the environment that
fastpar is being installed into. If torch is there, its headers are used from there and nothing is downloaded; torch is
never imported. Otherwise torch is named as a build requirement, so that the isolated environment gets one.
"""

from native import find_torch
from setuptools import build_meta as _setuptools
from setuptools.build_meta import *  # noqa: F403


def _torch_requirement() -> list[str]:
    return [] if find_torch() else ["torch>=2.11"]


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    return [*_setuptools.get_requires_for_build_wheel(config_settings), *_torch_requirement()]


def get_requires_for_build_editable(config_settings: dict | None = None) -> list[str]:
    return [*_setuptools.get_requires_for_build_editable(config_settings), *_torch_requirement()]
