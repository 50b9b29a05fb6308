"""The page: what stands where, and which function answers what. The functions are thin; :class:`Lens` does the work."""

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import gradio as gr
from PIL import Image

from eigengrain.cli.explain import CUTS, SCALES
from eigengrain.data.decode import ImageError
from eigengrain.explain.perturbation import TOWARD
from eigengrain.explain.relu_rules import RULES
from eigengrain.explorer import downloads, views
from eigengrain.explorer.limits import CONCURRENCY, CONCURRENT_MAPS, KEPT_BYTES, MAX_RUNS, MAX_STEPS, open_upload
from eigengrain.explorer.memory import Memory
from eigengrain.explorer.perturbing import Perturbation
from eigengrain.explorer.session import EXAMPLE, Lens, facts
from eigengrain.explorer.view import FIRST_RULES, PREDICTED, View, make_view, read_view

STYLE = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
TITLE = "What large and small eigenvalues see"

#: examples of a class that the gallery shows
SHOWN = 12

#: the address follows the view, so that a copy of it shows the same
_SET_ADDRESS = "(query) => { history.replaceState(null, '', location.pathname + '?' + query); }"
_COPY_ADDRESS = "() => { navigator.clipboard?.writeText(location.href); }"
#: [name, address with the content] → a file in the visitor's folder of downloads
_SAVE = (
    "(file) => { if (!file) return; const [name, uri] = JSON.parse(file); const link = document.createElement('a'); "
    "link.href = uri; link.download = name; document.body.append(link); link.click(); link.remove(); }"
)

#: what an event has in common: no help pages are made of it
_PRIVATE: dict[str, Any] = {"api_visibility": "private"}


def theme() -> gr.themes.Base:
    """Fonts that every machine has: none is fetched."""
    sans = ["system-ui", "-apple-system", "Segoe UI", "Helvetica Neue", "Arial", "sans-serif"]
    mono = ["ui-monospace", "Menlo", "Consolas", "monospace"]
    return gr.themes.Default(primary_hue="blue", neutral_hue="slate", font=sans, font_mono=mono, spacing_size="sm")


def _told(answer: Callable[..., Any]) -> Callable[..., Any]:
    """A visitor's mistake becomes a message on the page; anything else is a bug and keeps its traceback in the log."""

    @wraps(answer)
    def safely(*values: Any) -> Any:
        try:
            return answer(*values)
        except ValueError as error:
            raise gr.Error(escape(str(error)), print_exception=False) from None

    return safely


class Page:
    """Answers of the page, by what stands on it.

    Args:
        lenses: models by name, the first of which is shown first.
        uploads: folder in which the server keeps what is uploaded.
    """

    def __init__(self, lenses: Mapping[str, Lens], uploads: str | Path):
        self.lenses, self.uploads = dict(lenses), Path(uploads)
        #: by file, whose name says its content: where two visitors send the same one, the first to be answered deletes it
        self._opened = Memory[Image.Image](KEPT_BYTES // 4, lambda image: 3 * image.width * image.height)
        #: by visitor
        self._running: dict[str, Perturbation] = {}

    def lens(self, name: object) -> Lens:
        found = self.lenses.get(str(name))
        if found is None:
            raise ValueError("there is no such model here")
        return found

    def view(self, model: object, image: object, *rest: Any) -> tuple[Lens, View]:
        lens = self.lens(model)
        return lens, make_view(lens, str(image), *rest)

    # what is shown

    def glance(self, *values: Any) -> tuple[str, str, str, str]:
        """Numbers, spectrum, predictions and address: what a moved split changes at once."""
        lens, view = self.view(*values)
        look = lens.look(view.image)
        answers = lens.answers(look, view.split, view.custom)
        return (
            views.numbers(facts(look.eigenvalues, view.split), lens.channels, view.split),
            views.spectrum(lens, look, view.split, answers),
            views.predictions(lens, look, answers),
            view.query(),
        )

    def maps(self, *values: Any) -> str:
        """The maps of the view."""
        lens, view = self.view(*values)
        explained = lens.explain(lens.look(view.image), view.split, view.rules, view.custom, view.target_class, view.cut)
        return views.maps(explained, lens.subsets(view.split, view.custom), view.scale)

    def picture(self, model: object, image: object) -> str:
        lens = self.lens(model)
        return views.picture(lens, lens.look(str(image)))

    # what is chosen

    def opened(self, request: gr.Request) -> list[Any]:
        """Every choice, as the address says, then the class and the examples of the gallery."""
        view = read_view(dict(request.query_params), self.lenses)
        lens = self.lenses[view.model]
        shown = self._class_of(lens, view.image)
        return [
            view.model,
            view.image,
            gr.Slider(value=view.split, maximum=lens.channels - 1),
            list(view.rules),
            view.custom,
            gr.Dropdown(choices=self.targets(lens), value=view.target),
            view.cut,
            view.scale,
            gr.Dropdown(choices=self.classes(lens), value=shown),
            self.gallery(view.model, shown),
        ]

    def other_model(self, model: object, image: object, split: Any, query: object) -> list[Any]:
        """The same view with another model, as far as it has the same image and as many eigenvalues.

        A list that is left without a choice tells its value too: where that is the model of the view, ``query``, all stays.
        """
        lens = self.lens(model)
        former = dict(parse_qsl(str(query)))
        if former.get("model") == lens.name:
            return [gr.skip() for _ in range(6)]
        words = {"model": lens.name, "image": str(image), "split": str(split)}
        view = read_view(words, self.lenses)
        shown = self._class_of(lens, view.image)
        # what the visitor wrote stays; what the former model keeps itself says nothing about this one
        left = self.lenses.get(former.get("model", ""))
        untouched = left is None or former.get("custom", "") == left.own
        return [
            view.image,
            gr.Slider(value=view.split, maximum=lens.channels - 1),
            view.custom if untouched else gr.skip(),
            gr.Dropdown(choices=self.targets(lens), value=PREDICTED),
            gr.Dropdown(choices=self.classes(lens), value=shown),
            self.gallery(lens.name, shown),
        ]

    def classes(self, lens: Lens) -> list[tuple[str, int]]:
        return [(name, number) for number, name in enumerate(lens.images.classes)]

    def targets(self, lens: Lens) -> list[tuple[str, str]]:
        return [("the predicted class", PREDICTED), *((name, str(number)) for number, name in enumerate(lens.classes))]

    def _class_of(self, lens: Lens, image: str) -> int:
        number = image.removeprefix(EXAMPLE)
        return lens.images.labels[int(number)] if image.startswith(EXAMPLE) else 0

    def gallery(self, model: object, label: object) -> list[Image.Image]:
        """Examples of a class."""
        lens = self.lens(model)
        number = label if isinstance(label, int) else 0
        return [lens.thumbnail(example) for example in lens.of_class(number, SHOWN)]

    def choose(self, model: object, label: object, event: gr.SelectData) -> str:
        """The key of the example that was clicked on."""
        numbers = self.lens(model).of_class(label if isinstance(label, int) else 0, SHOWN)
        if not isinstance(event.index, int) or not 0 <= event.index < len(numbers):
            raise ValueError("there is no such example")
        return f"{EXAMPLE}{numbers[event.index]}"

    def upload(self, model: object, path: str | None) -> tuple[str, None]:
        """The key of an uploaded image; the file itself is deleted."""
        if not path:
            raise ValueError("nothing was uploaded")
        try:
            look = self.lens(model).upload(self._open(path), f"uploaded: {Path(path).name}")
        finally:
            self._forget(path)
        return look.key, None

    def _open(self, path: str) -> Image.Image:
        try:
            image = open_upload(path, self.uploads)
        except (ImageError, OSError):
            opened = self._opened.get(path)
            if opened is None:
                raise
            return opened
        self._opened.put(path, image)
        return image

    def _forget(self, path: str) -> None:
        file = Path(path).resolve()
        if file.is_relative_to(self.uploads.resolve()):
            file.unlink(missing_ok=True)

    # what is done

    def perturb(self, *values: Any) -> Iterator[str]:
        """Change the image, and show it on its way."""
        *chosen, toward, steps, rate, request = values
        try:
            lens, view = self.view(*chosen)
            look = lens.look(view.image)
            run = Perturbation(lens, look, str(toward), view.split, int(steps), float(rate))
        except (TypeError, ValueError, OverflowError) as error:
            raise gr.Error(escape(str(error)), print_exception=False) from None
        visitor = str(request.session_hash)
        self.stop(request)
        self._running[visitor] = run
        try:
            for progress in run.updates():
                yield views.perturbed(look, progress, str(toward))
        finally:
            run.stop()
            if self._running.get(visitor) is run:
                del self._running[visitor]

    def stop(self, request: gr.Request) -> None:
        """End the visitor's perturbation, if there is one."""
        run = self._running.get(str(request.session_hash))
        if run is not None:
            run.stop()

    def stop_all(self) -> None:
        for run in list(self._running.values()):
            run.stop()

    def panel(self, *values: Any) -> str:
        """The panel as a file to save."""
        lens, view = self.view(*values)
        look = lens.look(view.image)
        explained = lens.explain(look, view.split, view.rules, view.custom, view.target_class, view.cut)
        return _file(f"eigengrain-{_stem(view)}.png", "image/png", downloads.panel(explained, view.scale))

    def table(self, *values: Any) -> str:
        """The numbers as a file to save."""
        lens, view = self.view(*values)
        look = lens.look(view.image)
        text = downloads.table(lens, look, view.split, lens.answers(look, view.split, view.custom))
        return _file(f"eigengrain-{_stem(view)}.csv", "text/csv;charset=utf-8", text.encode())


def _stem(view: View) -> str:
    name = view.image if view.image.startswith(EXAMPLE) else "upload"
    return f"{name}-split{view.split}"


def _file(name: str, kind: str, content: bytes) -> str:
    return json.dumps([name, f"data:{kind};base64,{base64.b64encode(content).decode()}"])


def build(page: Page) -> gr.Blocks:
    """The page with everything connected."""
    first = next(iter(page.lenses.values()))
    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=(600, 3600)) as blocks:
        with gr.Row(equal_height=True):
            with gr.Column(scale=3, elem_id="title"):
                gr.Markdown(
                    f"# {TITLE}\nThe covariance of an image's features, split into its large and its small eigenvalues: "
                    "what each part says, and where it looks."
                )
            model = gr.Dropdown(list(page.lenses), value=first.name, label="Model", elem_id="model", scale=2)
        with gr.Row():
            with gr.Column(scale=1, min_width=300):
                picture = gr.HTML(elem_id="picture")
                label = gr.Dropdown(page.classes(first), value=0, label="Examples of", elem_id="class")
                gallery = gr.Gallery(
                    label="Choose one",
                    show_label=False,
                    columns=4,
                    height="auto",
                    object_fit="cover",
                    allow_preview=False,
                    interactive=False,
                    buttons=[],
                    elem_id="gallery",
                )
                upload = gr.File(
                    label="An image of your own, up to 10 MB",
                    file_count="single",
                    type="filepath",
                    height=140,
                    elem_id="upload",
                )
                rules = gr.CheckboxGroup(
                    list(RULES), value=list(FIRST_RULES), label="Rules at the rectifiers", elem_id="rules"
                )
                target = gr.Dropdown(page.targets(first), value=PREDICTED, label="Explain", elem_id="target")
                cut = gr.Radio(list(CUTS), value=CUTS[0], label="The kept subspace turns (exact) or not", elem_id="cut")
                scale = gr.Radio(
                    [("a row", SCALES[0]), ("each map", SCALES[1])],
                    value=SCALES[0],
                    label="One scale of colours for",
                    elem_id="scale",
                )
                custom = gr.Textbox(
                    label="Subset of your own",
                    placeholder="such as top:1+last:12",
                    max_length=200,
                    submit_btn="keep",
                    elem_id="custom",
                )
            with gr.Column(scale=3, min_width=520):
                numbers = gr.HTML(elem_id="numbers")
                spectrum = gr.HTML(elem_id="spectrum")
                split = gr.Slider(
                    1,
                    first.channels - 1,
                    value=1,
                    step=1,
                    label="Eigenvalues that count as large",
                    buttons=[],  # its button for the first value knows that of no view, and tells no one
                    elem_id="split",
                )
                answers = gr.HTML(elem_id="answers")
                with gr.Tab("Where it looks", elem_id="tab-maps"):
                    shown = gr.HTML(elem_id="maps")
                with gr.Tab("Change the image", elem_id="tab-perturb"):
                    with gr.Row():
                        toward = gr.Radio(list(TOWARD), value="small", label="Toward eigenvalues", elem_id="toward")
                        steps = gr.Slider(10, MAX_STEPS, value=200, step=10, label="Steps", elem_id="steps")
                        rate = gr.Slider(0.005, 0.2, value=0.02, step=0.005, label="Rate", elem_id="rate")
                    with gr.Row():
                        start = gr.Button("Start", variant="primary", elem_id="start")
                        stop = gr.Button("Stop", variant="stop", elem_id="stop")
                    changed = gr.HTML(elem_id="changed")
                with gr.Row():
                    save_panel = gr.Button("Save the panel (PNG)", size="sm", elem_id="save-panel")
                    save_table = gr.Button("Save the numbers (CSV)", size="sm", elem_id="save-table")
                    copy = gr.Button("Copy the address of this view", size="sm", elem_id="copy")
        image = gr.Textbox(visible=False)
        query = gr.Textbox(visible=False)
        file = gr.Textbox(visible=False)

        chosen = [model, image, split, rules, custom, target, cut, scale]
        # values come as they are: make_view looks at them, and moves a split that was typed in as the page does, where
        # gradio would refuse it and leave the page with another one than the box
        quick: dict[str, Any] = {
            "fn": _told(page.glance),
            "inputs": chosen,
            "preprocess": False,
            "outputs": [numbers, spectrum, answers, query],
            "show_progress": "hidden",
            "concurrency_limit": CONCURRENCY,
            "concurrency_id": "glance",
        }
        slow: dict[str, Any] = {
            "fn": _told(page.maps),
            "inputs": chosen,
            "preprocess": False,
            "outputs": shown,
            "show_progress": "minimal",
            "concurrency_limit": CONCURRENT_MAPS,
            "concurrency_id": "maps",
        }
        address: dict[str, Any] = {"fn": None, "inputs": query, "js": _SET_ADDRESS, **_PRIVATE}

        def after(event: Any, new_image: bool = True) -> None:
            """Show what was chosen: the image, then what is quick, then the maps."""
            if new_image:
                seen = event.then(_told(page.picture), [model, image], picture, show_progress="hidden", **_PRIVATE)
            else:
                seen = event
            seen.then(**quick, **_PRIVATE).then(**address)
            seen.then(**slow, **_PRIVATE)

        everything = [*chosen, label, gallery]
        after(blocks.load(page.opened, None, everything, show_progress="hidden", **_PRIVATE))
        seen = [model, image, split, query]
        after(model.input(_told(page.other_model), seen, [image, split, custom, target, label, gallery], **_PRIVATE))
        label.input(_told(page.gallery), [model, label], gallery, show_progress="hidden", **_PRIVATE)
        # a function that is told what was clicked on names the event in its signature
        after(gallery.select(_choosing(page), [model, label], image, show_progress="hidden", **_PRIVATE))
        uploaded = upload.upload(_told(page.upload), [model, upload], [image, upload], show_progress="minimal", **_PRIVATE)
        after(uploaded)
        uploaded.failure(lambda: None, None, upload, **_PRIVATE)  # a refused file makes room for the next one too
        # the last position of a moved split is always answered, those on the way where there is time
        split.input(**quick, trigger_mode="always_last", api_name="split_glance").then(**address)
        split.input(**slow, trigger_mode="always_last", api_name="split_maps")
        for choice in (rules.input, target.input, cut.input, scale.input, custom.submit, custom.blur):
            choice(**quick, trigger_mode="always_last", **_PRIVATE).then(**address)
            choice(**slow, trigger_mode="always_last", **_PRIVATE)

        start.click(
            _perturbing(page),
            [*chosen, toward, steps, rate],
            changed,
            show_progress="hidden",
            concurrency_limit=MAX_RUNS,
            trigger_mode="once",
            **_PRIVATE,
        )
        stop.click(_stopping(page), None, None, queue=False, show_progress="hidden", **_PRIVATE)
        blocks.unload(_stopping(page))
        for button, answer in ((save_panel, page.panel), (save_table, page.table)):
            saved = button.click(_told(answer), chosen, file, show_progress="minimal", concurrency_limit=2, **_PRIVATE)
            saved.then(None, file, js=_SAVE, **_PRIVATE)
        copy.click(None, js=_COPY_ADDRESS, **_PRIVATE)
    return blocks


def _choosing(page: Page) -> Callable[..., str]:
    def choose(model: str, label: int, event: gr.SelectData) -> str:
        return str(_told(page.choose)(model, label, event))

    return choose


def _perturbing(page: Page) -> Callable[..., Iterator[str]]:
    def perturb(
        model: str,
        image: str,
        split: int,
        rules: Sequence[str],
        custom: str,
        target: str,
        cut: str,
        scale: str,
        toward: str,
        steps: int,
        rate: float,
        request: gr.Request,
    ) -> Iterator[str]:
        yield from page.perturb(model, image, split, rules, custom, target, cut, scale, toward, steps, rate, request)

    return perturb


def _stopping(page: Page) -> Callable[..., None]:
    def stop(request: gr.Request) -> None:
        page.stop(request)

    return stop
