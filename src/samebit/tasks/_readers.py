"""Read JSON Lines, CSV and Parquet row by row; a bad row is a value with a place and a reason.

Lines end at U+000A only: U+2028, U+2029 and U+0085 inside a record are text. A byte-order mark at
the start is dropped. Nothing here looks at what the columns mean.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
_WIDE = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass(frozen=True)
class RawRow:
    """One record. `place` is `file:line` or `file, row n`; `error` is empty for a good one."""

    place: str
    values: dict[str, Any]
    error: str = ""


def read_rows(path: Path, *, encoding: str = "utf-8", max_row_bytes: int) -> Iterator[RawRow]:
    """Yield the rows of a file, bad ones included.

    Raises ValueError for what concerns the whole file: missing, empty, of an unknown kind, in an
    unknown encoding, without a header, or Parquet without pyarrow.
    """
    if path.is_dir():
        raise ValueError(f"{path}: a folder; name the files in it, such as {path}/*.jsonl.")
    if not path.is_file():
        raise ValueError(f"{path}: no such file.")
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        hint = " One object a line? Rename it to .jsonl." if suffix == ".json" else ""
        raise ValueError(f"{path}: unknown kind {suffix!r}; known: {', '.join(SUFFIXES)}.{hint}")
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: the file is empty.")
    if suffix == ".parquet":
        return _parquet_rows(path)
    encoding = _encoding_of(path, encoding)
    if suffix in (".csv", ".tsv"):
        return _csv_rows(path, encoding, "," if suffix == ".csv" else "\t", max_row_bytes)
    return _json_rows(path, encoding, max_row_bytes)


def _encoding_of(path: Path, encoding: str) -> str:
    try:
        name = codecs.lookup(encoding).name
    except LookupError as error:
        raise ValueError(f"encoding = {encoding!r}: unknown to Python.") from error
    with path.open("rb") as stream:
        start = stream.read(4)
    for mark, wide in _WIDE:
        if start.startswith(mark):
            return wide
    return "utf-8-sig" if name in ("utf-8", "utf-8-sig") else name


def _json_rows(path: Path, encoding: str, max_row_bytes: int) -> Iterator[RawRow]:
    for number, line in _lines(path, encoding, max_row_bytes):
        place = f"{path}:{number}"
        if isinstance(line, str):
            yield RawRow(place, {}, line)
            continue
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            yield RawRow(
                place, {}, f"not {encoding} at byte {error.start} of the line ({error.reason})"
            )
            continue
        if not text.strip():
            continue
        yield _json_row(place, text)


def _lines(path: Path, encoding: str, max_row_bytes: int) -> Iterator[tuple[int, bytes | str]]:
    """Yield (line number, UTF-8 bytes, or the reason why not); never holds an over-long line."""
    if encoding == "utf-8-sig":
        stream: io.BufferedIOBase | _Recoded = path.open("rb")
        if stream.read(3) != codecs.BOM_UTF8:
            stream.seek(0)
    else:
        stream = _Recoded(path, encoding)
    with stream:
        number = 0
        while line := stream.readline(max_row_bytes + 1):
            number += 1
            if len(line) > max_row_bytes and not line.endswith(b"\n"):
                while line and not line.endswith(b"\n"):
                    line = stream.readline(1 << 20)
                yield number, f"the row is longer than {max_row_bytes} bytes"
                continue
            yield number, line.rstrip(b"\n")


class _Recoded:
    """A text file in another encoding, read as lines of UTF-8; bad bytes stay undecodable."""

    def __init__(self, path: Path, encoding: str) -> None:
        self._text = path.open("r", encoding=encoding, errors="surrogateescape", newline="\n")
        self._place = str(path)

    def __enter__(self) -> _Recoded:
        return self

    def __exit__(self, *_: object) -> None:
        self._text.close()

    def readline(self, size: int) -> bytes:
        try:
            # An escaped bad byte becomes three bytes that strict UTF-8 refuses in that line only.
            return self._text.readline(size).encode("utf-8", errors="surrogatepass")
        except UnicodeError as error:
            raise ValueError(f"{self._place}: {error}") from error


def _json_row(place: str, text: str) -> RawRow:
    try:
        values = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except RecursionError:
        return RawRow(place, {}, "nested too deeply")
    except ValueError as error:
        return RawRow(place, {}, f"not a JSON object: {error}")
    if not isinstance(values, dict):
        return RawRow(place, {}, f"a JSON {type(values).__name__}, expected an object")
    return RawRow(place, values)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise ValueError(f"keys given twice: {', '.join(twice)}")
    return values


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _csv_rows(path: Path, encoding: str, delimiter: str, max_row_bytes: int) -> Iterator[RawRow]:
    # Undecodable bytes become lone surrogates, so that only their row is bad.
    csv.field_size_limit(max(csv.field_size_limit(), max_row_bytes))
    with path.open("r", encoding=encoding, errors="surrogateescape", newline="") as stream:
        reader = csv.reader(stream, delimiter=delimiter, strict=True)
        header = _csv_header(path, reader)
        while True:
            number = reader.line_num + 1
            place = f"{path}:{number}"
            try:
                fields = next(reader)
            except StopIteration:
                return
            except (csv.Error, UnicodeError) as error:
                yield RawRow(place, {}, f"not CSV: {error}")
                continue
            if not fields:
                continue
            yield _csv_row(place, header, fields, encoding, max_row_bytes)


def _csv_row(
    place: str, header: list[str], fields: list[str], encoding: str, max_row_bytes: int
) -> RawRow:
    if len(fields) != len(header):
        return RawRow(place, {}, f"{len(fields)} fields, the header has {len(header)}")
    if sum(map(len, fields)) > max_row_bytes:
        return RawRow(place, {}, f"the row is longer than {max_row_bytes} bytes")
    for name, value in zip(header, fields, strict=True):
        if any("\udc80" <= character <= "\udcff" for character in value):
            return RawRow(place, {}, f"column {name!r}: not {encoding.removesuffix('-sig')}")
    return RawRow(place, dict(zip(header, fields, strict=True)))


def _csv_header(path: Path, reader: Any) -> list[str]:
    try:
        header = next(reader)
    except (StopIteration, csv.Error, UnicodeError) as error:
        raise ValueError(f"{path}:1: no header row can be read ({error}).") from error
    if len(set(header)) != len(header) or not all(header):
        raise ValueError(f"{path}:1: column names are empty or repeated: {header}.")
    return header


def _parquet_rows(path: Path) -> Iterator[RawRow]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{path}: reading Parquet needs pyarrow: pip install 'samebit[parquet]'."
        ) from error
    try:
        file = parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a readable Parquet file ({error}).") from error
    return _parquet_batches(path, file)


def _parquet_batches(path: Path, file: Any) -> Iterator[RawRow]:
    import pyarrow

    number = 0
    with file:
        try:
            for batch in file.iter_batches(batch_size=256):
                for values in batch.to_pylist():
                    yield RawRow(f"{path}, row {number}", values)
                    number += 1
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}, after row {number}: unreadable ({error}).") from error
    if number == 0:
        raise ValueError(f"{path}: the file has no rows.")
