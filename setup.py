"""Adds the C extension to what pyproject.toml says."""

import sysconfig

from setuptools import setup

limited_api = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    cffi_modules=["numkong_py/_ffi_build.py:ffibuilder"],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if limited_api else {},
)
