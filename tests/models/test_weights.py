"""Checkpoints: what is read is what was written; anything unsound is refused by file name."""

import errno
import hashlib
import json
import struct
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from samebit.models import weights
from samebit.models.weights import (
    INDEX_FILE,
    SINGLE_FILE,
    CheckpointReader,
    TensorSource,
    atomic_folder,
    sources_of,
    write_checkpoint,
)

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b.weight": torch.arange(5, dtype=torch.bfloat16) - 2,
    "c.weight": torch.full((2, 3), 0.5, dtype=torch.float16),
    "empty": torch.zeros(0, 7, dtype=torch.bfloat16),
}


def rewrite_index(folder, change):
    index = json.loads((folder / INDEX_FILE).read_text())
    change(index["weight_map"])
    (folder / INDEX_FILE).write_text(json.dumps(index))


def test_one_file_is_read_back_bit_for_bit(tmp_path):
    digests = write_checkpoint(tmp_path, sources_of(TENSORS))
    assert list(digests) == [SINGLE_FILE]
    reader = CheckpointReader(tmp_path)
    assert reader.names() == ("a.weight", "b.weight", "c.weight", "empty")
    assert "a.weight" in reader and "z" not in reader
    for name, tensor in TENSORS.items():
        assert reader.shape(name) == tuple(tensor.shape) and reader.dtype(name) == tensor.dtype
        assert torch.equal(reader.read(name), tensor)


def test_the_writer_agrees_with_the_safetensors_library(tmp_path):
    """FP8 and INT8 codes included, slices and transposes too."""
    codes = (torch.arange(48).reshape(6, 8) - 20).to(torch.float8_e4m3fn)
    tensors = {
        **TENSORS,
        "codes": codes[1:5, :3],
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "int8": torch.tensor([-127, 0, 127], dtype=torch.int8),
        "scalar": torch.tensor(3.5),
    }
    write_checkpoint(tmp_path, sources_of(tensors))
    read = load_file(tmp_path / SINGLE_FILE)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        assert torch.equal(
            read[name].reshape(-1).view(torch.uint8),
            tensor.contiguous().reshape(-1).view(torch.uint8),
        )


def test_shards_and_index_agree_and_the_total_is_right(tmp_path):
    digests = write_checkpoint(tmp_path, sources_of(TENSORS), shard_bytes=50)
    assert digests == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()
    }
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    # 48 bytes, then 10 + 12 + 0.
    assert index["metadata"]["total_size"] == 70
    assert index["weight_map"] == {
        "a.weight": "model-00001-of-00002.safetensors",
        "b.weight": "model-00002-of-00002.safetensors",
        "c.weight": "model-00002-of-00002.safetensors",
        "empty": "model-00002-of-00002.safetensors",
    }
    reader = CheckpointReader(tmp_path)
    assert all(torch.equal(reader.read(name), tensor) for name, tensor in TENSORS.items())


def test_one_tensor_is_loaded_at_a_time(tmp_path):
    alive = 0

    def load():
        nonlocal alive
        assert alive == 0
        alive += 1
        tensor = torch.ones(1000)

        def gone():
            nonlocal alive
            alive -= 1

        weakref.finalize(tensor, gone)
        return tensor

    write_checkpoint(
        tmp_path, [TensorSource(f"t{i}", torch.float32, (1000,), load) for i in range(4)]
    )
    assert CheckpointReader(tmp_path).names() == ("t0", "t1", "t2", "t3")


def test_a_read_tensor_does_not_alias_the_file(tmp_path):
    write_checkpoint(tmp_path, sources_of(TENSORS))
    reader = CheckpointReader(tmp_path)
    reader.read("a.weight").fill_(-1)
    assert torch.equal(reader.read("a.weight"), TENSORS["a.weight"])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda m: m.update({"a.weight": "../model.safetensors"}), "not a file beside it"),
        (lambda m: m.update({"a.weight": "/etc/passwd"}), "not a file beside it"),
        (lambda m: m.update({"a.weight": ".."}), "not a file beside it"),
        (lambda m: m.update({"a.weight": 3}), "not a file beside it"),
        (lambda m: m.update({"a.weight": "pytorch_model.bin"}), "only safetensors"),
        (lambda m: m.update({"a.weight": "model-00009-of-00009.safetensors"}), "is missing"),
        (lambda m: m.update({"z": "model-00001-of-00002.safetensors"}), "'z' is listed"),
        (lambda m: m.pop("b.weight"), "'b.weight' is in the file"),
        (lambda m: m.update({"a.weight": m["b.weight"]}), r"'a\.weight'"),
        (lambda m: m.clear(), "weight_map is missing or empty"),
    ],
)
def test_index_refusals(tmp_path, change, named):
    write_checkpoint(tmp_path, sources_of(TENSORS), shard_bytes=50)
    rewrite_index(tmp_path, change)
    with pytest.raises(ValueError, match=named):
        CheckpointReader(tmp_path)


def test_two_layouts_in_one_folder_are_refused(tmp_path):
    write_checkpoint(tmp_path, sources_of(TENSORS), shard_bytes=50)
    write_checkpoint(tmp_path, sources_of(TENSORS))
    with pytest.raises(ValueError, match="stale"):
        CheckpointReader(tmp_path)


def test_pickle_is_refused_by_name(tmp_path):
    torch.save(TENSORS, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pickled \(pytorch_model.bin\)"):
        CheckpointReader(tmp_path)
    (tmp_path / SINGLE_FILE).write_bytes((tmp_path / "pytorch_model.bin").read_bytes())
    with pytest.raises(ValueError, match="not a sound safetensors file"):
        CheckpointReader(tmp_path)


def test_other_dtypes_and_unknown_names_and_wrong_shapes_are_named(tmp_path):
    write_checkpoint(tmp_path, sources_of(TENSORS))
    reader = CheckpointReader(tmp_path)
    with pytest.raises(ValueError, match="no tensor 'z'"):
        reader.read("z")
    with pytest.raises(ValueError, match=r"shape \[3, 4\], config.json asks for \[4, 3\]"):
        reader.read("a.weight", (4, 3))
    save_file({"long": torch.arange(3)}, tmp_path / SINGLE_FILE)
    with pytest.raises(ValueError, match="'long' is stored as I64"):
        CheckpointReader(tmp_path)


def header_of(raw):
    return struct.unpack("<Q", raw[:8])[0]


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: b"",
        lambda raw: raw[:7],
        lambda raw: raw[:-1],
        lambda raw: raw + b"\0",
        lambda raw: (2**63).to_bytes(8, "little") + raw[8:],
        lambda raw: (10**12).to_bytes(8, "little") + raw[8:],
        lambda raw: raw[:8] + b"x" + raw[9:],
        lambda raw: raw.replace(b'"shape":[3,4]', b'"shape":[9,9]'),
        lambda raw: raw.replace(b'"shape":[3,4]', b'"shape":[-1,]'),
    ],
)
def test_damaged_files_are_named(tmp_path, damage):
    write_checkpoint(tmp_path, sources_of(TENSORS))
    path = tmp_path / SINGLE_FILE
    raw = path.read_bytes()
    path.write_bytes(damage(raw))
    assert path.read_bytes() != raw
    with pytest.raises(ValueError, match=SINGLE_FILE):
        CheckpointReader(tmp_path)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_damage_to_a_header_escapes_as_anything_but_a_named_error(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damaged")
    write_checkpoint(folder, sources_of(TENSORS))
    path = folder / SINGLE_FILE
    raw = bytearray(path.read_bytes())
    end = 8 + header_of(raw)
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        reader = CheckpointReader(folder)
        held = sum(reader.read(name).nbytes for name in reader.names())
    except ValueError as error:
        assert SINGLE_FILE in str(error)
    else:
        assert held <= len(raw)


def test_an_atomic_folder_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "out"
    with pytest.raises(RuntimeError), atomic_folder(target) as folder:
        (folder / "half").write_text("x")
        assert not target.exists()
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with atomic_folder(target) as folder:
        (folder / "whole").write_text("x")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(ValueError, match="already exists"), atomic_folder(target):
        pass
    assert (target / "whole").read_text() == "x"


def test_a_full_disk_is_said_before_and_during_and_leaves_nothing(tmp_path, monkeypatch):
    with pytest.raises(OSError, match="bytes are needed") as known:
        with atomic_folder(tmp_path / "out", needed_bytes=10**18):
            pass
    assert known.value.errno == errno.ENOSPC

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(weights.os, "fsync", full)
    with pytest.raises(OSError, match="filled while writing") as late:
        with atomic_folder(tmp_path / "out") as folder:
            write_checkpoint(folder, sources_of(TENSORS))
    assert late.value.errno == errno.ENOSPC and str(tmp_path / "out") in str(late.value)
    assert list(tmp_path.iterdir()) == []
