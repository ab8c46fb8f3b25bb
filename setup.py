"""Reads settings.ini, so that versions and requirements stand in one place."""
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
parser = ConfigParser(delimiters=["="])
parser.read(here / "settings.ini", encoding="utf-8")
cfg = parser["DEFAULT"]

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=cfg["author"],
    author_email=cfg["author_email"],
    url=cfg["git_url"],
    license="MIT",
    license_files=["LICENSE"],
    keywords=cfg["keywords"].split(),
    python_requires=f">={cfg['min_python']}",
    packages=find_packages(include=["fact_nb", "fact_nb.*"]),
    package_data={"fact_nb": ["py.typed"], "fact_nb.lab": ["claims.toml", "history.toml"]},
    install_requires=cfg["requirements"].split(),
    extras_require={k: cfg[f"{k}_requirements"].split() for k in ("dev", "dask", "peers", "integrations", "archive")},
    entry_points={"console_scripts": cfg["console_scripts"].split(), "nbdev": [f"{cfg['lib_name']}={cfg['lib_name']}._modidx:d"]},
    classifiers=["Programming Language :: Python :: 3 :: Only", "Intended Audience :: Science/Research", "Topic :: Scientific/Engineering :: Artificial Intelligence"],
    zip_safe=False,
)
