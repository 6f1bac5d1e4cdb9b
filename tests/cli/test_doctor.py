"""`fzero doctor`: what it finds, what it says is missing, and when it fails."""

from __future__ import annotations

import importlib.metadata
import json

import pytest
import torch

import fzero as fz
from fzero.cli import doctor_command, main


def test_it_shows_versions_and_the_machine(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert fz.__version__ in out and torch.__version__ in out and "/dev/shm" in out
    assert out.endswith("fzero can train on this machine\n")


def test_json_has_the_same_findings(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("FZERO_CACHE", str(tmp_path))
    (tmp_path / "functions").mkdir(mode=0o700)
    (tmp_path / "functions" / "x.so").write_bytes(bytes(2048))
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    values = {x["name"]: x["value"] for x in report["findings"]}
    assert report["ok"] and values["torch"] == torch.__version__ and values["cache"] == f"{tmp_path}, 2.0 KiB"


def test_without_a_compiler_it_says_how_to_get_one_and_how_to_do_without(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert main(["doctor"]) == 0, "the eager backend needs none"
    out = capsys.readouterr().out
    assert "apt install g++" in out and "backend='eager'" in out


@pytest.mark.parametrize(("missing", "code", "says"), [("einops", 1, "Fix: pip"), ("peft", 0, "pip install peft")])
def test_a_missing_package(capsys, monkeypatch, missing, code, says):
    version = importlib.metadata.version

    def without(name):
        if name == missing:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(doctor_command, "_required", lambda: ["torch", "einops"])
    monkeypatch.setattr(importlib.metadata, "version", without)
    assert main(["doctor"]) == code
    assert says in capsys.readouterr().out


def test_a_compiler_that_cxx_names_must_exist(capsys, monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "/nonexistent is not found" in out and "unset it to use g++" in out


def test_a_cache_that_cannot_be_used_is_named(capsys, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for where, why in (("file", "is not a folder"), ("open/cache", "can be written to by other users")):
        monkeypatch.setenv("FZERO_CACHE", str(tmp_path / where))
        main(["doctor"])
        out = capsys.readouterr().out
        assert f"{tmp_path / where} is not used: " in out and why in out
    monkeypatch.setenv("FZERO_CACHE", str(tmp_path / "new" / "cache"))
    main(["doctor"])
    assert "new/cache, empty" in capsys.readouterr().out
