"""The model card, uploads to a hub that runs in the test, and the script for ONNX files that the card contains."""

import base64
import contextlib
import io
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

import eigengrain as eg
from eigengrain.errors import ArgumentError, FailedError, FileError
from eigengrain.models import ModelCard, push_to_hub
from eigengrain.models.card import escape_markdown
from eigengrain.models.export import export_onnx
from eigengrain.pages import TEMPLATES
from eigengrain.text import printable, wilson_interval
from eigengrain.training.run_folder import TrainedModel

HOSTILE = ["</code><script>alert(1)</script>", "a\n---\nlicense: mit\n# heading", "[x](http://a.org) `b` | *c* {{ 7 * 7 }}"]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return eg.create_model("test_resnet", head="mpncov", reduce=4, num_classes=3)


def front_matter(text: str) -> dict[str, object]:
    start, front, _ = text.split("---\n", 2)
    assert start == ""
    return yaml.safe_load(front)


def blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_a_card_has_the_metadata_of_the_hub_and_the_accuracy_with_its_interval(model, tmp_path):
    card = ModelCard("birds", train_images=1200, test_images=200, accuracy=91.5, license="cc-by-4.0")
    eg.save_pretrained(model, tmp_path, ["wren", "robin", "tit"], img_size=64, card=card)
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1  # who may read one file may read all
    text = (tmp_path / "README.md").read_text()
    values = front_matter(text)
    assert values["library_name"] == "eigengrain"
    assert values["pipeline_tag"] == "image-classification"
    assert values["license"] == "cc-by-4.0"
    [result] = values["model-index"][0]["results"]
    assert (result["dataset"]["name"], result["metrics"][0]["value"]) == ("birds", 0.915)
    low, high = (f"{100 * bound:.1f}" for bound in wilson_interval(183, 200))
    for part in ("wren, robin, tit", "1,200 training images", "64 × 64", "mpncov", "91.5 %", low, high):
        assert part in text


def test_a_card_without_facts_states_none(model, tmp_path):
    eg.save_pretrained(model, tmp_path, img_size=64)
    text = (tmp_path / "README.md").read_text()
    assert not {"license", "model-index"} & front_matter(text).keys()
    assert not {"## Accuracy", "## Data", "## Classes"} & set(text.splitlines())


def test_a_users_text_is_neither_markup_nor_metadata(model, tmp_path):
    plain, hostile = (tmp_path / name for name in ("plain", "hostile"))
    eg.save_pretrained(model, plain, list("abc"), card=ModelCard("d", 1, 1, 100.0, "mit", "e"))
    eg.save_pretrained(model, hostile, HOSTILE, card=ModelCard(HOSTILE[1], 1, 1, 100.0, HOSTILE[1], HOSTILE[0]))
    expected, text = ((folder / "README.md").read_text() for folder in (plain, hostile))
    values = front_matter(text)
    assert values.keys() == front_matter(expected).keys()
    assert values["license"] == printable(HOSTILE[1])
    body = text[text.index("\n# ") :]
    assert re.findall("^#+ .*|^```.*|^---.*", body, re.MULTILINE) == re.findall(
        "^#+ .*|^```.*|^---.*", expected[expected.index("\n# ") :], re.MULTILINE
    )
    prose = re.sub(r"```.*?```|`[^`\n\\]*`", "", body, flags=re.DOTALL)
    assert not re.search(r"(?<!\\)[<>\[\]|`*{}]", prose)
    assert re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", escape_markdown(HOSTILE[2])) == HOSTILE[2]


@pytest.mark.parametrize("facts", [{"accuracy": 101.0}, {"accuracy": -1.0}, {"test_images": 0}, {"train_images": -1}])
def test_numbers_out_of_range(facts):
    with pytest.raises(ArgumentError) as error:
        ModelCard(**facts)
    assert error.value.argument in facts


# --- the hub ---------------------------------------------------------------------------------------------------------


class Hub(ThreadingHTTPServer):
    """The requests of an upload: create a repository, validate the card, announce files, commit."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Visit)
        self.paths, self.tokens, self.files, self.created, self.refuse = [], set(), {}, {}, False


class Visit(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"])).decode()
        self.server.paths.append(self.path)
        self.server.tokens.add(self.headers["authorization"])
        if self.server.refuse:
            return self.reply({"error": "You are not allowed"}, 403)
        if self.path == "/api/repos/create":
            self.server.created = json.loads(body)
            return self.reply({"url": f"http://127.0.0.1:{self.server.server_port}/owner/birds"})
        if self.path.endswith("/preupload/main"):
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]
            ]
            return self.reply({"files": files})
        if self.path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return self.reply({"commitUrl": "http://127.0.0.1/owner/birds/commit/1", "commitOid": "1", "hookOutput": ""})
        return self.reply({} if self.path == "/api/validate-yaml" else {"error": "unknown"}, 200)

    def do_GET(self):
        self.server.paths.append(self.path)
        self.reply({"id": "owner/birds", "sha": "0", "siblings": []})

    def reply(self, document, status=200):
        content = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    server = Hub()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("kind", ["model", "wrapped", "folder", "run"])
def test_a_pushed_model_can_be_loaded_again(hub, model, tmp_path, kind):
    model.class_names = ["wren", "robin", "tit"]
    model.eval()
    source = {
        "model": model,
        "wrapped": torch.nn.DataParallel(model),
        "folder": tmp_path / "mine" / "model",
        "run": tmp_path / "mine",
    }[kind]
    if kind in ("folder", "run"):
        eg.save_pretrained(model, tmp_path / "mine" / "model")
        (tmp_path / "mine" / "model" / "private.jpg").write_bytes(b"not for the hub")
    url = push_to_hub(source, "owner/birds", private=True, token="hf_secret")
    assert url.endswith("/owner/birds/commit/1")
    assert (hub.created["name"], hub.created["organization"]) == ("birds", "owner")
    assert hub.created.get("visibility") == "private" or hub.created.get("private") is True
    assert hub.tokens == {"Bearer hf_secret"}
    assert set(hub.files) == {"model.safetensors", "config.json", "README.md"}
    (tmp_path / "loaded").mkdir()
    for name, content in hub.files.items():
        (tmp_path / "loaded" / name).write_bytes(content)
    loaded, x = eg.from_pretrained(tmp_path / "loaded"), torch.randn(2, 3, 64, 64)
    assert loaded.class_names == model.class_names
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))


def test_uploads_that_fail(hub, model, tmp_path, monkeypatch):
    with pytest.raises(FileError):
        push_to_hub(tmp_path, "owner/birds", token="t")
    with pytest.raises(ArgumentError) as error:
        push_to_hub(model, "not a name/x/y", token="t")
    assert error.value.argument == "repo_id"
    with pytest.raises(ArgumentError) as error:
        push_to_hub(tmp_path, "owner/birds", card=ModelCard())
    assert error.value.argument == "card"
    hub.refuse = True
    with pytest.raises(FailedError) as failed:
        push_to_hub(model, "owner/birds", token="t")
    assert "\n" not in str(failed.value)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    with pytest.raises(FailedError):
        push_to_hub(model, "owner/birds", token="t")


# --- the script for ONNX files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"crop_pct": 0.875, "crop_mode": "center", "interpolation": "bilinear"},
        {"crop_pct": 0.9, "crop_mode": "squash", "interpolation": "bicubic"},
    ],
)
def test_the_script_of_the_card_gives_the_answers_of_the_model(model, tmp_path, monkeypatch, settings):
    pytest.importorskip("onnxruntime")
    own = eg.create_model("test_resnet", head="mpncov", reduce=4, num_classes=3).eval()
    own.load_state_dict(model.state_dict())
    own.pretrained_cfg |= settings
    own.class_names = ["wren", "robin", "tit"]
    own.calibration = {"temperature": 0.05}
    eg.save_pretrained(own, tmp_path, img_size=48)
    export_onnx(own, tmp_path / "model.onnx", img_size=48, verify=False)
    photo = Image.effect_noise((101, 77), 90).convert("RGB")
    photo.putpixel((3, 3), (255, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned
    photo.save(tmp_path / "photo.jpg", quality=95, exif=exif)
    monkeypatch.chdir(tmp_path)
    script = blocks(Path("README.md").read_text())[-1]
    names: dict[str, object] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(script, names)
    image, _ = TrainedModel(eg.from_pretrained(tmp_path)).images(["photo.jpg"])[0]
    torch.testing.assert_close(torch.from_numpy(names["batch"])[0], image, atol=1e-5, rtol=0)
    with torch.no_grad():
        expected = (own(image[None]).double() / 0.05).softmax(-1)[0]
    lines = [line.split() for line in printed.getvalue().splitlines()]
    order = expected.argsort(descending=True).tolist()
    assert [name for _, name in lines] == [own.class_names[k] for k in order]
    assert [float(share) for share, _ in lines] == pytest.approx([float(expected[k]) for k in order], abs=2e-3)


def test_the_documentation_shows_the_same_script():
    script = (TEMPLATES / "run_onnx.txt").read_text().strip()
    assert script in (Path(__file__).parents[2] / "docs" / "libraries.md").read_text()
    imported = set(re.findall(r"^(?:import|from) (\w+)", script, re.MULTILINE))
    assert imported == {"json", "numpy", "onnxruntime", "PIL"}
