"""Folders of safetensors: the file, shape and dtype of each tensor, according to the files' headers (the service checks
before a job is placed, and a rank before it reads); and new files, with the names that transformers looks for. Pure
Python.

The format (https://huggingface.co/docs/safetensors): 8 bytes with the header's length, little endian; the header, JSON;
the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from manta.workers.config import JobSpec, ModelConfig
from manta.workers.data.read_errors import is_of_the_storage, weights_error
from manta.workers.errors import WeightsError
from manta.workers.system.regular_files import open_regular, read_regular, refuse_pointer
from manta.workers.weights.mapping import HuggingFaceTensor, huggingface_tensors

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

ONE_FILE = "model.safetensors"
INDEX = f"{ONE_FILE}.index.json"
ADAPTER = "adapter_model.safetensors"
BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of a number, by the dtypes that can be read."""
_ALL_BYTES = {**BYTES, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_MAX_HEADER_BYTES = 100_000_000
"""The library's limit too."""
_MAX_INDEX_BYTES = 64 * 2**20
"""Of the index: enough for 600,000 tensors at 100 bytes each."""

NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Names of the written dtypes in a file's header, by torch's names."""
FLUSH_BYTES = 64 * 2**20
"""After this many bytes of a file, those so far are sent to the disk in the background: otherwise writing would stop
for that."""
_ALIGNMENT = 8


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file."""

    file: Path
    name: str
    """The file's name for it."""
    shape: tuple[int, ...]
    dtype: str
    first: int
    """Position of the tensor's first byte in the file."""
    of_expert: ExpertPart | None = None
    """Which part of the file's tensor it is, if that has the matrices of all experts of a layer."""


class ExpertPart(NamedTuple):
    """One expert's matrix in a tensor of all experts', [E, rows, columns], or transposed, [E, columns, rows]."""

    expert: int
    first_row: int
    """Row with which the matrix begins: of one tensor for gate and up, gate comes first."""
    transposed: bool


def check_weights(spec: JobSpec) -> None:
    """Raise WeightsError unless the weights that the job begins with, if any, are all there as the model needs them."""
    if spec.model.from_ is not None:
        tensors_of(spec)


def weight_files(folder: Path) -> list[Path]:
    """The files that contain the weights in `folder`: as for transformers, an index beside a whole file is left from
    an earlier save. Raises WeightsError."""
    if _is_there(folder / ADAPTER):
        raise WeightsError(f"{folder / ADAPTER} is an adapter: merge it into the weights first")
    if _is_there(folder / ONE_FILE):
        return [folder / ONE_FILE]
    index = folder / INDEX
    if _is_there(index):
        return sorted(set(_weight_map(index).values()))
    pickles = next((path for pattern in ("*.bin", "*.pt", "*.pth") for path in _listed(folder, pattern)), None)
    if pickles is not None:
        raise WeightsError(f"{pickles} is a pickle, which Manta never loads: save the model as safetensors")
    if (folder / ONE_FILE).is_symlink():
        target = (folder / ONE_FILE).readlink()
        raise WeightsError(
            f"{folder / ONE_FILE} is a link to {target}, which is not there; a hub's cache needs its blobs too"
        )
    others = ", ".join(path.name for kind in ("*.safetensors", "*.gguf") for path in _listed(folder, kind))
    raise WeightsError(f"{folder} has neither {ONE_FILE} nor {INDEX}" + (f", only {others}" if others else ""))


def _is_there(path: Path) -> bool:
    """False also if the folder may not be entered, unlike in pathlib. Raises WeightsUnreadable."""
    try:
        path.stat()
    except OSError as error:
        if is_of_the_storage(error):
            raise weights_error(path, error) from error
        return False
    except ValueError:
        return False
    return True


def _listed(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(path for path in folder.glob(pattern) if not path.name.startswith("."))
    except OSError as error:
        raise weights_error(folder, error) from error


def tensors_of(spec: JobSpec, headers: Mapping[str, FileTensor] | None = None) -> dict[str, FileTensor]:
    """Where each of `huggingface_tensors(spec)` is in the folder `spec.model.from_`, by its name there. `headers`: what
    `read_headers` says of that folder. Raises WeightsError if one is missing, has another shape or a dtype that cannot
    be read, or if there is a tensor of unknown purpose."""
    folder = Path(spec.model.from_ or "")
    headers = read_headers(folder) if headers is None else headers
    wanted = huggingface_tensors(spec)
    at, used = {}, set()
    for tensor in wanted:
        here = next((headers[name] for name in _spellings(tensor.name) if name in headers), None)
        here = here or _of_all_experts(spec.model, tensor, headers)
        if here is None:
            longer = next((name for name in sorted(headers) if name.endswith(f".{tensor.name}")), None)
            prefix = f"; {longer} is there: save the model without what precedes these names" if longer else ""
            raise WeightsError(f"{folder} has no tensor {tensor.name}, which its config.json requires{prefix}")
        _check(tensor, here)
        at[tensor.name] = here
        used.add(here.name)
    tied = {"lm_head.weight"} if spec.model.tie_embeddings else set()
    for name in headers.keys() & tied:
        _check_tied(headers[name], at[wanted[0].name])
    predicts = predicting_layers(spec.model, headers)
    unknown = sorted(
        name for name in headers.keys() - used - tied if not name.endswith(_BUFFERS) and not name.startswith(predicts)
    )
    if unknown:
        names = ", nor ".join(unknown[:5]) + (f", nor {len(unknown) - 5} more" if unknown[5:] else "")
        raise WeightsError(f"{headers[unknown[0]].file}: the model in config.json has no tensor {names}")
    return at


def predicting_layers(model: ModelConfig, names: Iterable[str]) -> tuple[str, ...]:
    """Beginnings of the names of layers behind the last one with which DeepSeek V3 predicts more than one token
    (arXiv:2412.19437, section 2.2), which are not trained here."""
    if model.family != "deepseek":
        return ()
    found = (_PREDICTING.fullmatch(name) for name in names)
    return tuple(f"{each[1]}{each[2]}." for each in found if each is not None and int(each[2]) >= model.layers)


_PREDICTING = re.compile(r"((?:model\.)?layers\.)(\d+)\.eh_proj\.weight")
_OF_EXPERT = re.compile(r"(.*\.)(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_UP, _DOWN = ("up_proj", "w3"), ("down_proj", "w2")


def _of_all_experts(
    model: ModelConfig, tensor: HuggingFaceTensor, headers: Mapping[str, FileTensor]
) -> FileTensor | None:
    """One expert's matrix in the tensor of all experts' that transformers has in memory: gate_up_proj [E, 2 f, h] and
    down_proj [E, h, f], or both transposed. Raises WeightsError for other shapes."""
    match, moe = _OF_EXPERT.fullmatch(tensor.name), model.moe
    if match is None or moe is None:
        return None
    before, number, matrix = match.groups()
    f, h = moe.ffn_hidden_size, model.hidden_size
    together = {"gate_up_proj": (moe.experts, 2 * f, h), "down_proj": (moe.experts, h, f)}
    for prefix, end in product((f"{before}mlp", f"{before}block_sparse_moe"), ("", ".weight")):
        found = [
            next((headers[name] for name in _spellings(f"{prefix}.experts.{each}{end}") if name in headers), None)
            for each in together
        ]
        if None in found:
            continue
        both = [each for each in found if each is not None]
        shapes = [each.shape for each in both]
        if shapes not in ([*together.values()], [(e, n, m) for e, m, n in together.values()]):
            needs = " and ".join(str(list(shape)) for shape in together.values())
            raise WeightsError(
                f"{both[0].file}: {both[0].name} and {both[1].name} have shapes {list(shapes[0])} and "
                f"{list(shapes[1])}, but config.json requires {needs}, or both transposed"
            )
        here = both[matrix in _DOWN]
        part = ExpertPart(int(number), f if matrix in _UP else 0, shapes != [*together.values()])
        return replace(here, shape=tensor.shape, of_expert=part)
    return None


def _check_tied(output: FileTensor, tokens: FileTensor) -> None:
    """Raise WeightsError if the file's output layer, which is not read, is not the table of tokens: samples of their
    bytes are compared."""
    if (output.shape, output.dtype) != (tokens.shape, tokens.dtype) or samples_of(output) != samples_of(tokens):
        raise WeightsError(
            f"{output.file}: {output.name} is not {tokens.name}, but config.json says that they are one: set "
            "tie_word_embeddings to false there to train both, or leave out the former"
        )


_SAMPLES, _SAMPLE_BYTES = 64, 64


def samples_of(tensor: FileTensor, count: int = _SAMPLES) -> list[bytes]:
    """Bytes of the tensor at even distances, from its first to its last. Raises WeightsError."""
    size = math.prod(tensor.shape) * BYTES.get(tensor.dtype, 0)
    starts = [max(0, size - _SAMPLE_BYTES) * n // (count - 1) for n in range(count)]
    try:
        with open_regular(tensor.file) as file:
            return [os.pread(file.fileno(), _SAMPLE_BYTES, tensor.first + start) for start in starts]
    except OSError as error:
        raise weights_error(tensor.file, error) from error


_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Endings of names of tensors that older releases of transformers saved and that are not needed."""


def _spellings(name: str) -> tuple[str, ...]:
    """A model that was saved without its output layer has no prefix."""
    return name, name.removeprefix("model.").removeprefix("transformer.")


def _check(tensor: HuggingFaceTensor, here: FileTensor) -> None:
    where = f"{here.file}: {here.name}"
    if here.dtype not in BYTES:
        raise WeightsError(f"{where} has dtype {here.dtype}: supported: {', '.join(BYTES)}")
    longer = tensor.may_be_longer and here.shape[1:] == tensor.shape[1:] and here.shape[0] >= tensor.shape[0]
    if here.shape != tensor.shape and not longer:
        raise WeightsError(f"{where} has shape {list(here.shape)}, but config.json requires {list(tensor.shape)}")


def read_headers(folder: Path) -> dict[str, FileTensor]:
    """All tensors of `folder`, by name. Raises WeightsError if a file is truncated or not a safetensors file, or if the
    index names something that is missing."""
    tensors: dict[str, FileTensor] = {}
    for file in weight_files(folder):
        for tensor in header_of(file):
            if tensor.name in tensors:
                raise WeightsError(f"{tensor.name} is in {tensors[tensor.name].file.name} and in {file}")
            tensors[tensor.name] = tensor
    index = folder / INDEX
    for name, file in () if _is_there(folder / ONE_FILE) else _weight_map(index).items():
        if name not in tensors or tensors[name].file != file:
            raise WeightsError(f"{file} does not contain {name}, although {index} lists it there")
    return tensors


def _weight_map(index: Path) -> dict[str, Path]:
    try:
        names = json.loads(read_regular(index, _MAX_INDEX_BYTES))["weight_map"]
        files = {name: index.parent / file for name, file in names.items()}
        inside = all(Path(file).name == file and file not in ("", "..") for file in names.values())
    except OSError as error:
        raise weights_error(index, error) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(
            f"{index} is not an index of safetensors files: it must have an object weight_map"
        ) from error
    if not inside:
        raise WeightsError(f"{index} names a file outside of its folder")
    return files


def header_of(file: Path) -> Iterator[FileTensor]:
    """The tensors of a safetensors file. Raises WeightsError if it is truncated or something else."""
    try:
        refuse_pointer(file)
        with open_regular(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > size - 8:
                raise WeightsError(f"{file} is truncated or not a safetensors file: its header extends past the end")
            if length > _MAX_HEADER_BYTES:
                raise WeightsError(f"{file}: its header has {length} bytes; at most {_MAX_HEADER_BYTES} are allowed")
            header = json.loads(stream.read(length))
            entries = [
                _entry(file, name, entry, 8 + length) for name, entry in header.items() if name != "__metadata__"
            ]
    except OSError as error:
        raise weights_error(file, error) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{file} is not a safetensors file: its header is invalid") from error
    for tensor, end in entries:
        if 8 + length + end > size:
            missing = f"{8 + length + max(end for _, end in entries) - size} bytes are missing"
            raise WeightsError(f"{file} is truncated: {tensor.name} extends past its end ({missing})")
        yield tensor


def _entry(file: Path, name: str, entry: dict[str, Any], header: int) -> tuple[FileTensor, int]:
    """The tensor, and its end in bytes after the header, which ends after `header` bytes. Raises ValueError and similar
    errors."""
    begin, end = entry["data_offsets"]
    shape = tuple(int(size) for size in entry["shape"])
    wide = _ALL_BYTES.get(entry["dtype"])
    if begin < 0 or min(shape, default=0) < 0 or (wide is not None and end - begin != math.prod(shape) * wide):
        raise WeightsError(f"{file}: {name} has a size that does not match its shape and dtype")
    return FileTensor(file, name, shape, str(entry["dtype"]), header + begin), end


def plan_files(tensors: Sequence[HuggingFaceTensor], dtype: str, max_bytes: int) -> dict[str, list[HuggingFaceTensor]]:
    """Which file contains which tensors, in their order: as few files as possible, each of at most `max_bytes`, or
    with a single tensor that is larger."""
    shards: list[list[HuggingFaceTensor]] = [[]]
    room = max_bytes
    for tensor in tensors:
        size = size_of(tensor, dtype)
        if shards[-1] and size > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(tensor)
        room -= size
    if len(shards) == 1:
        return {ONE_FILE: shards[0]}
    stem = ONE_FILE.removesuffix(".safetensors")
    return {f"{stem}-{n:05d}-of-{len(shards):05d}.safetensors": shard for n, shard in enumerate(shards, start=1)}


def size_of(tensor: HuggingFaceTensor, dtype: str) -> int:
    """Bytes of a tensor in a file whose tensors are of `dtype`."""
    return math.prod(tensor.shape) * BYTES[NAMES[tensor.dtype or dtype]]


def index_of(files: dict[str, list[HuggingFaceTensor]], dtype: str) -> str:
    """The text of the index of `files`."""
    every = [tensor for tensors in files.values() for tensor in tensors]
    size, count = sum(size_of(each, dtype) for each in every), sum(math.prod(each.shape) for each in every)
    index = {
        "metadata": {"total_size": size, "total_parameters": count},
        "weight_map": {tensor.name: file for file, tensors in files.items() for tensor in tensors},
    }
    return json.dumps(index, indent=2) + "\n"


class NewFiles:
    """Files (by `plan_files`) that are created in a folder for the duration of a `with` block. What is not written is
    zero. Everything is on disk when the block has ended without an error; after an error the files should not be
    used."""

    def __init__(
        self,
        folder: Path,
        files: dict[str, list[HuggingFaceTensor]],
        dtype: str,
        wrote: Callable[[int], object] = lambda count: None,
    ):
        """`wrote` is called with the bytes of each piece, never by two threads at once."""
        self._folder, self._files, self._dtype, self._wrote = folder, files, dtype, wrote
        self._at: dict[str, tuple[IO[bytes], int, int]] = {}
        """File, first byte in it and number of bytes, by tensor."""
        self._unflushed: dict[IO[bytes], int] = {}
        self._flushes: list[Future[None]] = []
        self._lock = threading.Lock()
        self._open = ExitStack()
        self._flusher = ThreadPoolExecutor(1, "flush")

    def __enter__(self) -> NewFiles:
        """Create the files. Raises OSError."""
        with ExitStack() as stack:
            stack.callback(self._flusher.shutdown, cancel_futures=True)
            for name, tensors in self._files.items():
                stream = stack.enter_context((self._folder / name).open("xb", buffering=0))
                self._make(stream, tensors)
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raises OSError."""
        with self._open:
            if kind is None:
                for stream in self._unflushed:
                    put_on_disk(stream)
                for flush in self._flushes:
                    flush.result()

    def _make(self, stream: IO[bytes], tensors: Iterable[HuggingFaceTensor]) -> None:
        header, places, end = _new_header(tensors, self._dtype)
        _write_at(stream.fileno(), header, 0)
        # Space on the disk, allocated at once: a disk that is too small says so now, and no space is searched for
        # later.
        os.posix_fallocate(stream.fileno(), 0, len(header) + end)
        self._unflushed[stream] = 0
        for name, (first, last) in places.items():
            self._at[name] = stream, len(header) + first, last - first

    def write(self, name: str, at: int, content: ReadableBuffer) -> None:
        """Write `content`, C-contiguous, from byte `at` of the tensor `name` on. Raises OSError, ValueError if the
        tensor ends before that."""
        stream, first, size = self._at[name]
        view = memoryview(content).cast("B")
        if at < 0 or at + len(view) > size:
            raise ValueError(f"{name} has {size} bytes, not {at + len(view)}")
        _write_at(stream.fileno(), view, first + at)
        with self._lock:
            self._unflushed[stream] += len(view)
            if self._unflushed[stream] >= FLUSH_BYTES:
                self._unflushed[stream] = 0
                self._flushes.append(self._flusher.submit(os.fdatasync, stream.fileno()))
            self._wrote(len(view))


def _write_at(descriptor: int, content: bytes | memoryview, at: int) -> None:
    view = memoryview(content)
    while view:
        count = os.pwrite(descriptor, view, at)
        view, at = view[count:], at + count


def _new_header(tensors: Iterable[HuggingFaceTensor], dtype: str) -> tuple[bytes, dict[str, tuple[int, int]], int]:
    """The beginning of a file; each tensor's first byte after it, and the one after its last; the end of the file."""
    at, header, places = 0, {"__metadata__": {"format": "pt"}}, {}
    for tensor in tensors:
        end, name = at + size_of(tensor, dtype), NAMES[tensor.dtype or dtype]
        places[tensor.name] = at, end
        header[tensor.name] = {"dtype": name, "shape": list(tensor.shape), "data_offsets": [at, end]}  # type: ignore[dict-item]
        at = end
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % _ALIGNMENT)
    return len(content).to_bytes(8, "little") + content, places, at


def write_text(path: Path, text: str) -> None:
    """Create a file with this text, which is on disk when this returns. Raises OSError."""
    with path.open("xb") as stream:
        stream.write(text.encode())
        put_on_disk(stream)


def put_on_disk(stream: IO[bytes]) -> None:
    """Return once everything that was written to the file is on disk. Raises OSError."""
    stream.flush()
    os.fsync(stream.fileno())
