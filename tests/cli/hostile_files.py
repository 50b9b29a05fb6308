"""A child process that runs commands on hostile files, within limits, and records what each of them did.

``python hostile_files.py BASE`` makes all files in the folder BASE and prints one JSON document.
"""

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import struct
import sys
import time
import traceback
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

#: limits of a case
SECONDS, BYTES = 10, 2 << 30
BASE = Path(sys.argv[1] if __name__ == "__main__" else "base")
IMAGES = str(BASE / "images")
#: file that hostile code would create
CANARY = BASE / "canary"

Maker = Callable[[Path], object]


class Case(NamedTuple):
    """Files that ``make`` writes into an empty folder, and the command lines that open them; {} stands for the folder."""

    name: str
    make: Maker
    commands: Sequence[Sequence[str]]
    refused: bool = True  # or it is read, within the limits


class Call:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any):
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


CODE = Call(Path.touch, CANARY)
#: the same for libraries that instantiate classes by name
CLASS = {"class_path": "pathlib.Path.touch", "init_args": {"self": str(CANARY)}}


# ------------------------------------------------------------------------------------------------------- makers of files


def text(name: str, content: str | bytes) -> Maker:
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def pipe(name: str) -> Maker:
    return lambda folder: os.mkfifo(folder / name)


def link(name: str, target: str = "/dev/zero") -> Maker:
    return lambda folder: (folder / name).symlink_to(target)


def large(name: str) -> Maker:
    """A file of 100 GB that needs no space."""

    def make(folder: Path) -> None:
        (folder / name).touch()
        os.truncate(folder / name, 100 << 30)

    return make


def arrays(save: str, make: Callable[[Any], Any]) -> Maker:
    """A file of NumPy arrays, made by a function of the module ``numpy``."""

    def write(folder: Path) -> None:
        import numpy

        getattr(numpy, save)(folder / "weights.npz", **{"head/kernel": make(numpy)})

    return write


def claiming(folder: Path) -> None:
    """An array of 80 bytes whose header claims 80 TB."""
    arrays("savez", lambda numpy: numpy.zeros(10))(folder)
    file = folder / "weights.npz"
    content = file.read_bytes()
    file.write_bytes(content.replace(b"(10,), }" + b" " * 12, b"(10000000000000,), }", 1))


def pickled(content: Callable[[], object], **options: Any) -> Maker:
    def make(folder: Path) -> None:
        import torch

        torch.save(content(), folder / "weights.pt", **options)

    return make


def compressed(folder: Path) -> None:
    """A checkpoint of 200 MB in 200 kB."""
    pickled(lambda: {"a": tensors("zero")})(folder)
    with zipfile.ZipFile(folder / "weights.pt") as plain:
        entries = {entry.filename: plain.read(entry) for entry in plain.infolist()}
    with zipfile.ZipFile(folder / "weights.pt", "w", zipfile.ZIP_DEFLATED) as bomb:
        for name, content in entries.items():
            bomb.writestr(name, content)


def tensors(kind: str) -> Any:
    import torch
    from safetensors.torch import load_file

    change: dict[str, Callable[[Any], Any]] = {
        "expanded": lambda value: torch.zeros(1, dtype=torch.half).expand(100_000, 100_000),
        "meta": lambda value: value.to("meta"),
        "sparse": lambda value: value.to_sparse(),
        "quantised": lambda value: torch.quantize_per_tensor(value.float(), 0.1, 0, torch.qint8),
        "complex": lambda value: value.to(torch.complex64),
        "integer": lambda value: value.int(),
        "allocated": lambda value: Call(torch.FloatTensor, 25 << 30),
    }
    if kind == "zero":
        return torch.zeros(50_000_000)
    return {name: change[kind](value) for name, value in load_file(BASE / "model" / "model.safetensors").items()}


def in_itself() -> dict[str, Any]:
    state: dict[str, Any] = {}
    state["state_dict"] = state
    return state


def nested(depth: int) -> dict[str, Any]:
    return {"model": nested(depth - 1)} if depth else {}


def safetensors(header: Any, length: int | None = None, name: str = "weights.safetensors") -> Maker:
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    return text(name, struct.pack("<Q", len(body) if length is None else length) + body + bytes(64))


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, lines: int, comment: bytes = b"") -> bytes:
    """A PNG of one bit per pixel with the size of its header and another number of lines."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    body = zlib.compress((b"\0" + bytes((width + 7) // 8)) * lines)
    return b"\x89PNG\r\n\x1a\n" + header + comment + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def photo(folder: Path) -> None:
    """The first half of a JPEG."""
    from PIL import Image

    stream = io.BytesIO()
    Image.effect_noise((64, 64), 60).save(stream, "JPEG")
    (folder / "a.jpg").write_bytes(stream.getvalue()[: len(stream.getvalue()) // 2])


# ----------------------------------------------------------------------------------------------------- makers of folders


def model(*makers: Maker, **changes: Any) -> Maker:
    """A model folder with changed entries of config.json and other files."""

    def make(folder: Path) -> None:
        shutil.copytree(BASE / "model", folder, dirs_exist_ok=True)
        config = json.loads((folder / "config.json").read_text())
        for key, value in changes.items():
            config[key] = {**config[key], **value} if isinstance(value, dict) and config.get(key) else value
        (folder / "config.json").write_text(json.dumps(config))
        for maker in makers:
            maker(folder)

    return make


def instead(name: str, maker: Callable[[str], Maker]) -> Maker:
    """Another kind of file in place of one."""

    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        maker(name)(folder)

    return make


def finished(arguments: str, *makers: Maker) -> Maker:
    """A run folder with a model and other options."""

    def make(folder: Path) -> None:
        shutil.copytree(BASE / "model", folder / "model")
        (folder / "args.yaml").write_text(arguments)
        for maker in makers:
            maker(folder)

    return make


def unfinished(**state: Any) -> Maker:
    """A run folder with a checkpoint and without a model."""

    def make(folder: Path) -> None:
        (folder / "args.yaml").write_text(training(out=str(folder), resume=True))
        pickled(lambda: {"format": 1, **state})(folder)
        (folder / "weights.pt").rename(folder / "last.pt")

    return make


def photos(table: Maker) -> Maker:
    """Images in class folders, with a table of the splits."""

    def make(folder: Path) -> None:
        shutil.copytree(BASE / "images" / "train", folder, dirs_exist_ok=True)
        table(folder)

    return make


def record(content: str | Maker = "", **changes: Any) -> Maker:
    """A record of a run of the study ``gcp-methods``, as another text or file, or with changed entries."""

    def make(folder: Path) -> None:
        from studies.all_studies import find_study
        from studies.runs import describe_run
        from studies.settings import StudyOptions
        from studies.study import Setup

        study = find_study("gcp-methods")
        setup = Setup(StudyOptions(name="gcp-methods", scale="smoke", out=str(folder)))
        setup = replace(setup, seeds=study.choose_seeds(setup.options), available=study.datasets(setup))
        job = study.plan(setup)[0]
        (folder / "records").mkdir()
        file = folder / "records" / f"{job.name}.json"
        parts = {"name": job.name, "config": describe_run(job.config), "scores": {"test_top1": 50.0}, "environment": {}}
        parts |= {"analyses": {}, "seconds": 1.0, "epochs": []}
        if isinstance(content, str):
            file.write_text(content or json.dumps(parts | changes))
        else:
            content(file)

    return make


# ------------------------------------------------------------------------------------------------------------- the cases

OPTIONS = [[name, "--config", "{}/options.yaml"] for name in ("train", "evaluate", "predict", "datasets", "doctor")]
TRAIN = [["train", "--config", "{}/options.yaml", "--dry_run"]]
MODEL = [
    ["evaluate", "{}", "--data", "folder", "--root", IMAGES, "--workers", "0"],
    ["predict", IMAGES, "--checkpoint", "{}", "--out", "{}/out.csv"],
    ["explain", "{}", "--images", IMAGES, "--out", "{}/out"],
    ["export", "{}", "--out", "{}/out.onnx"],
    ["explore", "{}", "--data", "folder", "--root", IMAGES],
    ["report", "{}"],
    ["serve", "{}", "--port", "0"],
]
RUN = [["evaluate", "{}"], ["explain", "{}"], ["explore", "{}"], ["report", "{}"]]
CHECKPOINT = [["evaluate", "{}"], MODEL[1], MODEL[3], ["train", "--config", "{}/args.yaml"]]
SPLIT = [
    ["datasets", "check", "folder", "{}"],
    ["train", "--data.name", "folder", "--data.root", "{}", "--dry_run", "--out", "{}/run"],
    ["evaluate", f"{BASE}/model", "--data", "folder", "--root", "{}", "--out", "{}/out.csv"],
]
PHOTO = [
    ["predict", "{}", "--checkpoint", f"{BASE}/model", "--out", "{}/out.csv"],
    ["datasets", "check", "{}", "--workers", "0"],
    ["explain", f"{BASE}/model", "--images", "{}", "--out", "{}/out"],
]
STUDY = [["studies", "gcp-methods", "--only_report", "--scale", "smoke", "--out", "{}"]]


def weights(name: str) -> list[list[str]]:
    """Commands that open a file of weights."""
    network = ["--backbone", "test_resnet", "--head", "mpncov", "--num_classes", "2", "--reduce", "4"]
    small = ["--model.backbone", "test_resnet", "--model.head", "gap", "--dry_run", "--out", "{}/run"]
    return [
        ["predict", IMAGES, "--checkpoint", f"{{}}/{name}", "--out", "{}/out.csv", *network],
        ["export", f"{{}}/{name}", "--out", "{}/out.onnx", *network],
        ["train", "--data.name", "folder", "--data.root", IMAGES, "--model.weights", f"{{}}/{name}", *small],
    ]


TENSORS, PICKLED, ARRAYS = weights("weights.safetensors"), weights("weights.pt"), weights("weights.npz")


def options(content: Any) -> Maker:
    return text("options.yaml", content)


def training(data: Any = None, **sections: Any) -> str:
    """Options of a training on the images, as a file has them."""
    return json.dumps({"data": {"name": "folder", "root": IMAGES, **(data or {})}, **sections})


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{n}: &{n} [{', '.join(['*' + m] * 9)}]" for m, n in zip("abcdefgh", "bcdefghi", strict=True)
)
DEEP = "[" * 20_000 + "]" * 20_000
F32 = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
CONFIG, HEADER = "config.json", "model.safetensors"
#: hostile values of ``model`` in a file of options
NETWORKS: dict[str, dict[str, Any]] = {
    "reduce": {"backbone": "test_resnet", "reduce": 10**7},
    "activation": {"backbone": "test_resnet", "backbone_options": {"act_layer": "nope"}},
    "layers": {"backbone": "resnet18", "backbone_options": {"layers": [10**6] * 4}},
    "image size": {"backbone": "test_vit", "img_size": 10**5},
    "checkpoint": {"backbone": "test_resnet", "backbone_options": {"checkpoint_path": "/etc/passwd"}},
    "weights": {"backbone": "test_resnet", "weights": "/dev/zero"},
    "folder": {"backbone": "local-dir:/proc"},
    "subset": {"backbone": "test_resnet", "head": "mpncov", "head_options": {"subset": "(" * 2000 + ")" * 2000}},
}

CASES = [
    # files of options
    Case("yaml tag", options(f"data: !!python/object/apply:pathlib.Path.touch ['{CANARY}']"), OPTIONS),
    Case("yaml module", options("data: !!python/module:antigravity x"), OPTIONS),
    Case("yaml laughs", options(LAUGHS), OPTIONS),
    Case("yaml cycle", options("data: &a [*a]"), OPTIONS),
    Case("yaml depth", options(f"data: {DEEP}"), OPTIONS),
    Case("yaml number", options("epochs: " + "9" * 10_000), OPTIONS),
    Case("yaml documents", options("epochs: 1\n---\nepochs: 2"), OPTIONS),
    Case("yaml bytes", options(b"\xff\xfe\x00"), OPTIONS),
    Case("yaml list", options("- 1"), OPTIONS),
    Case("yaml class", options(json.dumps({"data": CLASS, "checkpoint": CLASS, "images": [CLASS]})), OPTIONS),
    Case("yaml large", large("options.yaml"), OPTIONS),
    Case("yaml pipe", pipe("options.yaml"), OPTIONS),
    Case("yaml device", link("options.yaml"), OPTIONS),
    Case("yaml class in options", options(training(optimiser={"options": CLASS})), TRAIN),
    *(Case(f"yaml {name}", options(training(model=value)), TRAIN) for name, value in NETWORKS.items()),
    *(
        Case(f"yaml split file {path}", options(training({"options": {"split_file": path}})), TRAIN)
        for path in ("/dev/zero", "/dev/stdin")
    ),
    # run folders
    Case("args tag", finished("data: !!python/name:os.system ''"), RUN),
    Case("args class", finished(json.dumps({"data": CLASS})), RUN),
    Case("args laughs", finished(LAUGHS), RUN),
    Case("args split file", finished(training({"options": {"split_file": "/dev/zero"}})), RUN),
    Case("args size", finished(training({"transforms": {"img_size": -5}})), RUN),
    Case("args type", finished(training(workers=[CLASS])), RUN),
    Case("checkpoint with code", unfinished(model=CODE), CHECKPOINT),
    Case("checkpoint without entries", unfinished(), CHECKPOINT),
    Case("checkpoint of types", unfinished(config=3, model=[], progress="x", class_names={}, ema=None), CHECKPOINT),
    # model folders
    Case("config depth", model(text(CONFIG, DEEP)), MODEL),
    Case("config list", model(text(CONFIG, "[]")), MODEL),
    Case("config number", model(text(CONFIG, "9" * 10_000)), MODEL),
    Case("config pipe", model(instead(CONFIG, pipe)), MODEL),
    Case("config device", model(instead(CONFIG, link)), MODEL),
    Case("config large", model(instead(CONFIG, large)), MODEL),
    Case("config classes", model(model={"num_classes": 2_000_000_000}), MODEL),
    Case("config reduce", model(model={"reduce": 10_000_000}), MODEL),
    Case("config negative size", model(pretrained_cfg={"input_size": [3, -5, 0]}), MODEL),
    Case("config image size", model(pretrained_cfg={"input_size": [3, 100_000, 100_000]}), MODEL),
    Case("config built size", model(model={"backbone": "test_vit", "img_size": [100_000, 100_000]}), MODEL),
    Case("config checkpoint", model(model={"checkpoint_path": "/etc/passwd"}), MODEL),
    Case("config pretrained", model(model={"pretrained": True}), MODEL),
    Case("config weights", model(model={"weights": "/etc/passwd"}), MODEL),
    Case("config hub", model(model={"backbone": "hf-hub:timm/resnet18"}), MODEL),
    Case("config folder", model(model={"backbone": "local-dir:/proc"}), MODEL),
    Case("config file", model(pretrained_cfg={"file": "/etc/passwd"}), MODEL),
    Case("config url", model(model={"pretrained_cfg_overlay": {"url": "http://127.0.0.1:9/x"}}), MODEL),
    Case("config layers", model(model={"layers": [10**5] * 4}), MODEL),
    Case("config activation", model(model={"act_layer": "nope"}), MODEL),
    Case("config class", model(model={"head_options": CLASS}), MODEL),
    Case("config subset", model(subset="+".join(["top:1"] * 16_000)), MODEL),
    Case("config nested subset", model(subset="(" * 2000 + "top:1" + ")" * 2000), MODEL),
    Case("config mean", model(pretrained_cfg={"mean": [float("nan")] * 3}), MODEL),
    Case("config names", model(label_names=[["a"], {"b": 1}]), MODEL),
    Case("config calibration", model(calibration={"temperature": float("nan")}), MODEL),
    Case("config entry", model(code="print(1)"), MODEL),
    Case("header length", model(safetensors({}, 1 << 62, HEADER)), MODEL),
    Case("header shape", model(safetensors({"a": {**F32, "shape": [10**10, 10**10]}}, name=HEADER)), MODEL),
    Case("header depth", model(safetensors(DEEP.encode(), name=HEADER)), MODEL),
    Case("header pipe", model(instead(HEADER, pipe)), MODEL),
    # files of weights
    Case("weights offsets", safetensors({"a": {**F32, "data_offsets": [1 << 62, (1 << 62) + 16]}}), TENSORS),
    Case("weights type", safetensors({"a": {**F32, "dtype": "F33"}}), TENSORS),
    Case("weights overlap", safetensors({"a": F32, "b": F32}), TENSORS),
    Case("weights large", large("weights.safetensors"), TENSORS),
    Case("archive with code", pickled(lambda: {"state_dict": {}, "epoch": CODE}), PICKLED),
    Case("pickle with code", pickled(lambda: [CODE], _use_new_zipfile_serialization=False), PICKLED),
    Case("archive compressed", compressed, PICKLED),
    Case("arrays code", arrays("savez", lambda numpy: numpy.array([CODE], dtype=object)), ARRAYS),
    Case("arrays compressed", arrays("savez_compressed", lambda numpy: numpy.zeros(1 << 25)), ARRAYS),
    Case("arrays claim", claiming, ARRAYS),
    Case("bytes of 100 GB", pickled(lambda: {"a": Call(bytearray, 100 << 30)}), PICKLED),
    Case("state dict in itself", pickled(in_itself), PICKLED),
    Case("state dict nested", pickled(lambda: nested(200)), PICKLED),
    *(
        Case(f"{kind} tensors", pickled(lambda kind=kind: tensors(kind)), PICKLED)  # type: ignore[misc]
        for kind in ("expanded", "meta", "sparse", "quantised", "complex", "integer", "allocated")
    ),
    # tables of splits
    Case("split columns", photos(text("split.csv", "a,b\n1,2\n")), SPLIT),
    Case("split field", photos(text("split.csv", "path,split\n" + "a" * 10**6 + ",train\n")), SPLIT),
    Case("split quote", photos(text("split.csv", 'path,split\n"a,train\n' * 1000)), SPLIT),
    Case("split bytes", photos(text("split.csv", b"path,split\n\x00\xff,train\n")), SPLIT),
    Case("split large", photos(large("split.csv")), SPLIT),
    Case("split elsewhere", photos(text("split.csv", "path,split\n/etc/passwd,train\n../../../etc/passwd,test\n")), SPLIT),
    # images
    Case("image size", text("a.png", png(100_000, 100_000, 1)), PHOTO),
    Case("image blank", text("a.png", png(6_000, 6_000, 6_000)), PHOTO, refused=False),
    Case("image width", text("a.png", png(1_000_000, 1, 1)), PHOTO),
    Case("image comment", text("a.png", png(8, 8, 8, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(200 << 20))))), PHOTO),
    Case("image cut short", photo, PHOTO),
    Case("image empty", text("a.jpg", b""), PHOTO),
    Case("image svg", text("a.png", "<svg xmlns='http://www.w3.org/2000/svg'><script>1</script></svg>"), PHOTO),
    Case("image eps", text("a.jpg", f"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n({CANARY}) (w) file\n"), PHOTO),
    Case("image device", link("a.png"), PHOTO),
    Case("image pipe", pipe("a.png"), PHOTO),
    # records
    Case("record depth", record(DEEP), STUDY),
    Case("record list", record("[1]"), STUDY),
    Case("record bytes", record("\x00"), STUDY),
    Case("record accuracy", record(scores={"test_top1": "<script>"}), STUDY),
    Case("record nan", record(scores={"test_top1": float("nan")}), STUDY),
    Case("record options", record(config={"model": CLASS}), STUDY),
    Case("record pipe", record(os.mkfifo), STUDY, refused=False),  # not a file, so that the run has no record
    Case("record device", record(lambda file: file.symlink_to("/dev/zero")), STUDY, refused=False),
]


# ------------------------------------------------------------------------------------------------------------- the child


class TooSlow(BaseException):
    """Raised by the alarm."""


class Watch:
    """What Python opens outside of allowed folders, starts or connects to; ``seen`` is None while nothing is watched."""

    def __init__(self, *allowed: str | Path):
        self.seen: list[str] | None = None
        self.allowed = tuple(os.path.realpath(path) for path in allowed)
        sys.addaudithook(self.hook)

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.seen is None:
            return
        if event == "open" and isinstance(args[0], str | bytes):
            path = os.path.realpath(os.fsdecode(args[0]))
            if not path.startswith(self.allowed):
                self.seen.append(f"open {path}")
        elif event in ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "socket.connect"):
            self.seen.append(f"{event} {args}")


def memory(entry: str) -> int:
    """An entry of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{entry}:"))


def call(words: Sequence[str]) -> dict[str, Any]:
    """Run one command and return its exit code, its messages, its time and its peak of memory."""
    from studies.__main__ import main as studies

    from eigengrain.cli import main as cli

    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before, start, code, crash = memory("VmRSS"), time.perf_counter(), None, ""
    errors, out = io.StringIO(), io.StringIO()
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(out):
            code = studies(words[1:]) if words[0] == "studies" else cli.main(words)
    except TooSlow:
        crash = "too slow"
    except BaseException:
        crash = traceback.format_exc()
    finally:
        signal.alarm(0)
    result = {"code": code, "crash": crash, "errors": errors.getvalue(), "out": out.getvalue()[-2000:]}
    return {**result, "seconds": time.perf_counter() - start, "peak": memory("VmHWM") - before}


def raise_too_slow(*_: Any) -> None:
    raise TooSlow


def prepare() -> None:
    """Write a model folder and images, and import what commands import, so that no case pays for it."""
    import torch
    from PIL import Image

    import eigengrain as eg
    import eigengrain.explorer.endpoint
    import eigengrain.explorer.server

    torch.set_num_threads(1)
    net = eg.create_model("test_resnet", head="mpncov", reduce=4, num_classes=2)
    eg.save_pretrained(net, BASE / "model", ["a", "b"], img_size=32)
    for split in ("train", "test"):
        for name in ("a", "b"):
            (BASE / "images" / split / name).mkdir(parents=True)
            for number in range(2):
                Image.effect_noise((32, 32), 50).save(BASE / "images" / split / name / f"{number}.png")


def run_case(watch: Watch, case: Case, words: Sequence[str], folder: Path) -> dict[str, Any]:
    folder.mkdir()
    case.make(folder)
    watch.seen = []
    result = call([word.replace("{}", str(folder)) for word in words])
    seen, watch.seen = watch.seen, None
    shutil.rmtree(folder)
    return {"name": case.name, "words": list(words), "refused": case.refused, "seen": seen, **result}


def main() -> None:
    prepare()
    root, own = Path(__file__).resolve().parents[2], ("/usr", "/proc/self/status", "/proc/self/clear_refs", "/proc/cpuinfo")
    watch = Watch(BASE, root, sys.prefix, sys.base_prefix, os.devnull, *own)
    signal.signal(signal.SIGALRM, lambda *_: None)
    # commands that succeed, which shows that they open what the cases change, and imports what is left
    control = Case("control", model(), MODEL[:2], refused=False)
    results = [run_case(watch, control, words, BASE / words[0]) for words in control.commands]
    signal.signal(signal.SIGALRM, raise_too_slow)
    size = memory("VmSize") + BYTES
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    for number, case in enumerate(CASES):
        results += [run_case(watch, case, words, BASE / f"{number}-{words[0]}") for words in case.commands]
    watch.seen = []
    with contextlib.suppress(OSError):
        open("/etc/hostname").close()
    print(json.dumps({"results": results, "canary": CANARY.exists(), "watched": watch.seen}))


if __name__ == "__main__":
    main()
