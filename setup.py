"""The parts of the build that pyproject.toml cannot say: a plain shared library in a py3-none-<platform> wheel.

_build/native.py compiles csrc/; this file only connects it to setuptools.
"""

import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).resolve().parent / "_build"))
from native import build, manylinux, options_from_environment
from portable import wheel_tag


class BuildLibrary(build_ext):
    """Builds fastpar/_C.so; the name carries no Python ABI because the library has none."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext: Extension) -> None:
        build(Path(self.get_ext_fullpath(ext.name)).resolve(), options_from_environment(is_checkout=False))


class PlatformWheel(bdist_wheel):
    """Tags the wheel py3-none-<platform>: any Python, one kind of machine; how old it may be says FASTPAR_MANYLINUX."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        policy = manylinux()
        return "py3", "none", wheel_tag(policy) if policy else super().get_tag()[2]


setup(
    packages=[*find_packages(include=["fastpar", "fastpar.*"]), "fastpar.kernels"],
    # kernels/ itself must hold no __init__.py: with the repository on sys.path it would shadow Hugging Face's
    # `kernels`.
    package_dir={"fastpar": "fastpar", "fastpar.kernels": "kernels/triton"},
    package_data={"fastpar": ["py.typed"]},
    include_package_data=False,
    ext_modules=[Extension("fastpar._C", sources=[])],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel},
)
