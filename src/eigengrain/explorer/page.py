"""The page: its controls, and the functions that handle their events. :class:`Session` does the work."""

import base64
import json
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import gradio as gr
from PIL import Image

from eigengrain.errors import ArgumentError, ImageError, UnknownName
from eigengrain.explain.plots import Explained
from eigengrain.explorer import limits, render
from eigengrain.explorer.limits import BoundedCache, image_bytes, open_upload
from eigengrain.explorer.perturbation import PerturbationRun
from eigengrain.explorer.session import EXAMPLE, Session, spectrum_facts
from eigengrain.explorer.view import FIRST_RULES, PREDICTED, View
from eigengrain.names import CUTS, DIRECTIONS, RULES, SCALES
from eigengrain.pages import TEMPLATES

STYLE = (TEMPLATES / "explorer" / "style.css").read_text(encoding="utf-8")
TITLE = "What large and small eigenvalues see"
ABOUT = (
    "The covariance of an image's features is split into its large and its small eigenvalues. See what the model predicts "
    "with each part, and which pixels matter for it."
)

#: examples of a class in the gallery
GALLERY_SIZE = 12

#: the address follows the view, so that a copied link shows the same
_SET_ADDRESS = "(query) => { history.replaceState(null, '', location.pathname + '?' + query); }"
_COPY_ADDRESS = "() => { navigator.clipboard?.writeText(location.href); }"
#: saves [file name, data URI] as a download
_SAVE = (
    "(file) => { if (!file) return; const [name, uri] = JSON.parse(file); const link = document.createElement('a'); "
    "link.href = uri; link.download = name; document.body.append(link); link.click(); link.remove(); }"
)

#: options of events that are not part of gradio's documented API
_PRIVATE: dict[str, Any] = {"api_visibility": "private"}


def theme() -> gr.themes.Base:
    """Use fonts that are installed everywhere, so that none is fetched."""
    sans = ["system-ui", "-apple-system", "Segoe UI", "Helvetica Neue", "Arial", "sans-serif"]
    mono = ["ui-monospace", "Menlo", "Consolas", "monospace"]
    return gr.themes.Default(primary_hue="blue", neutral_hue="slate", font=sans, font_mono=mono, spacing_size="sm")


def _show_errors(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Show a ValueError as a message on the page. Any other error is a bug, and its traceback goes to the log."""

    @wraps(handler)
    def handle(*values: Any) -> Any:
        try:
            return handler(*values)
        except ValueError as error:
            raise gr.Error(escape(str(error)), print_exception=False) from None

    return handle


class Page:
    """Event handlers of the page. The first session is shown first; ``uploads`` is the server's folder of uploads."""

    def __init__(self, sessions: Mapping[str, Session], uploads: str | Path):
        self.sessions, self.uploads = dict(sessions), Path(uploads)
        #: by path. gradio names a file by its content: if two visitors send the same one, the first request deletes it
        self._opened = BoundedCache[Image.Image](limits.CACHE_BYTES // 4, image_bytes)
        #: by visitor
        self._running: dict[str, PerturbationRun] = {}

    def session(self, name: object) -> Session:
        session = self.sessions.get(str(name))
        if session is None:
            raise UnknownName("model", str(name)[: limits.MAX_TEXT], self.sessions)
        return session

    def view(self, model: object, image: object, *rest: Any) -> tuple[Session, View]:
        session = self.session(model)
        return session, View.from_controls(session, str(image), *rest)

    # Results

    @_show_errors
    def glance(self, *values: Any) -> tuple[str, str, str, str]:
        """Numbers, spectrum, predictions and address: what a new split changes at once."""
        session, view = self.view(*values)
        analysis = session.analyse(view.image)
        predictions = session.predict(analysis, view.split, view.custom)
        return (
            render.numbers(spectrum_facts(analysis.eigenvalues, view.split), session.channels, view.split),
            render.spectrum(session, analysis, view.split, predictions),
            render.predictions(session, analysis, predictions),
            view.query(),
        )

    @_show_errors
    def maps(self, *values: Any) -> Any:
        """The saliency maps of the view."""
        try:
            session, view = self.view(*values)
        except ValueError:
            return gr.skip()  # glance, which runs at the same time, shows the error
        return render.maps(self._explain(session, view), session.subsets(view.split, view.custom), view.scale)

    def _explain(self, session: Session, view: View) -> Explained:
        analysis = session.analyse(view.image)
        return session.explain(analysis, view.split, view.rules, view.custom, view.target_class, view.cut)

    @_show_errors
    def picture(self, model: object, image: object) -> str:
        session = self.session(model)
        return render.picture(session, session.analyse(str(image)))

    # Choices

    def restore(self, request: gr.Request) -> list[Any]:
        """Values of all controls from the address."""
        view = View.from_query(dict(request.query_params), self.sessions)
        return [view.model, list(view.rules), view.cut, view.scale, *self._controls(view)]

    @_show_errors
    def change_model(self, model: object, image: object, split: Any, query: object) -> list[Any]:
        """Show the same view with another model, as far as it has the same image and number of eigenvalues.

        A dropdown that is closed without a new choice sends its value too: nothing changes if it is the model of ``query``.
        """
        session = self.session(model)
        former = dict(parse_qsl(str(query)))
        if former.get("model") == session.name:
            return [gr.skip() for _ in range(6)]
        words = {"model": session.name, "image": str(image), "split": str(split)}
        view = View.from_query(words, self.sessions)
        # keep a subset that the visitor wrote; replace the former model's own subset by that of the new model
        left = self.sessions.get(former.get("model", ""))
        untouched = left is None or former.get("custom", "") == left.own_subset
        image, split, custom, *rest = self._controls(view)
        return [image, split, custom if untouched else gr.skip(), *rest]

    def _controls(self, view: View) -> list[Any]:
        """Image, split, custom subset, target, and class and images of the gallery."""
        session = self.sessions[view.model]
        number = session.example_number(view.image)
        label = 0 if number is None else session.images.labels[number]
        return [
            view.image,
            gr.Slider(value=view.split, maximum=session.channels - 1),
            view.custom,
            gr.Dropdown(choices=self.targets(session), value=view.target),
            gr.Dropdown(choices=self.classes(session), value=label),
            self.gallery(session.name, label),
        ]

    def classes(self, session: Session) -> list[tuple[str, int]]:
        return [(name, number) for number, name in enumerate(session.images.classes)]

    def targets(self, session: Session) -> list[tuple[str, str]]:
        return [("predicted class", PREDICTED), *((name, str(number)) for number, name in enumerate(session.classes))]

    @_show_errors
    def gallery(self, model: object, label: object) -> list[Image.Image]:
        """Examples of a class."""
        session = self.session(model)
        return [session.thumbnail(number) for number in self._gallery_numbers(session, label)]

    def _gallery_numbers(self, session: Session, label: object) -> list[int]:
        return session.examples(label if isinstance(label, int) else 0, GALLERY_SIZE)

    @_show_errors
    def choose(self, model: object, label: object, event: gr.SelectData) -> str:
        """The key of the example that was clicked."""
        numbers = self._gallery_numbers(self.session(model), label)
        if not isinstance(event.index, int) or not 0 <= event.index < len(numbers):
            raise ArgumentError("example", "does not exist")
        return f"{EXAMPLE}{numbers[event.index]}"

    @_show_errors
    def upload(self, model: object, path: str | None) -> tuple[str, None]:
        """The key of an uploaded image; the file is deleted."""
        if not path:
            raise ArgumentError("file", "is missing")
        file = Path(path).resolve()
        try:
            analysis = self.session(model).upload(self._open(path), f"uploaded: {file.name}")
        finally:
            if file.is_relative_to(self.uploads.resolve()):
                file.unlink(missing_ok=True)
        return analysis.key, None

    def _open(self, path: str) -> Image.Image:
        try:
            image = open_upload(path, self.uploads)
        except (ArgumentError, ImageError, OSError):
            opened = self._opened.get(path)
            if opened is None:
                raise
            return opened
        self._opened.put(path, image)
        return image

    # Perturbation and downloads

    def perturb(self, request: gr.Request, *values: Any) -> Iterator[str]:
        """Perturb the image and show its progress."""
        run, visitor = self._perturbation(*values), str(request.session_hash)
        self.stop(request)
        self._running[visitor] = run
        try:
            for progress in run.updates():
                yield render.perturbation(run.analysis, progress, run.toward)
        finally:
            run.stop()
            if self._running.get(visitor) is run:
                del self._running[visitor]

    @_show_errors
    def _perturbation(self, *values: Any) -> PerturbationRun:
        *chosen, toward, steps, lr = values
        session, view = self.view(*chosen)
        return PerturbationRun(session, session.analyse(view.image), str(toward), view.split, int(steps), float(lr))

    def stop(self, request: gr.Request) -> None:
        """Stop the visitor's perturbation, if there is one."""
        run = self._running.get(str(request.session_hash))
        if run is not None:
            run.stop()

    def stop_all(self) -> None:
        for run in list(self._running.values()):
            run.stop()

    @_show_errors
    def save_panel(self, *values: Any) -> str:
        """The maps as a download."""
        session, view = self.view(*values)
        panel = render.panel_png(self._explain(session, view), view.scale)
        return _download(session, view, "png", "image/png", panel)

    @_show_errors
    def save_table(self, *values: Any) -> str:
        """The numbers as a download."""
        session, view = self.view(*values)
        analysis = session.analyse(view.image)
        predictions = session.predict(analysis, view.split, view.custom)
        text = render.table_csv(session, analysis, view.split, predictions)
        return _download(session, view, "csv", "text/csv;charset=utf-8", text.encode())


def _download(session: Session, view: View, suffix: str, kind: str, content: bytes) -> str:
    image = "upload" if session.example_number(view.image) is None else view.image
    name = f"eigengrain-{image}-split{view.split}.{suffix}"
    return json.dumps([name, f"data:{kind};base64,{base64.b64encode(content).decode()}"])


def build(page: Page) -> gr.Blocks:
    """Lay out the page and connect its events."""
    first = next(iter(page.sessions.values()))
    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=(600, 3600)) as blocks:
        with gr.Row(equal_height=True):
            with gr.Column(scale=3, elem_id="title"):
                gr.Markdown(f"# {TITLE}\n{ABOUT}")
            model = gr.Dropdown(list(page.sessions), value=first.name, label="Model", elem_id="model", scale=2)
        with gr.Row():
            with gr.Column(scale=1, min_width=300):
                picture = gr.HTML(elem_id="picture")
                label = gr.Dropdown(page.classes(first), value=0, label="Examples of class", elem_id="class")
                tiles: dict[str, Any] = {"columns": 4, "height": "auto", "object_fit": "cover", "allow_preview": False}
                gallery = gr.Gallery(show_label=False, interactive=False, buttons=[], elem_id="gallery", **tiles)
                megabytes = limits.MAX_BYTES // 2**20
                upload = gr.File(label=f"Your own image, up to {megabytes} MB", height=140, elem_id="upload")
                rules = gr.CheckboxGroup(
                    list(RULES), value=list(FIRST_RULES), label="Backward rules at the ReLUs", elem_id="rules"
                )
                target = gr.Dropdown(page.targets(first), value=PREDICTED, label="Class to explain", elem_id="target")
                cuts = [("moves (exact)", CUTS[0]), ("is fixed (projector)", CUTS[1])]
                cut = gr.Radio(cuts, value=CUTS[0], label="In the gradient, the kept subspace", elem_id="cut")
                scales = [("one per row", SCALES[0]), ("one per map", SCALES[1])]
                scale = gr.Radio(scales, value=SCALES[0], label="Colour scale", elem_id="scale")
                custom = gr.Textbox(
                    label="Your own subset of the eigenvalues",
                    placeholder="for example top:1+last:12",
                    max_length=limits.MAX_TEXT,
                    submit_btn="Apply",
                    elem_id="custom",
                )
            with gr.Column(scale=3, min_width=520):
                numbers = gr.HTML(elem_id="numbers")
                spectrum = gr.HTML(elem_id="spectrum")
                # without its reset button, which would move the slider without an event
                options: dict[str, Any] = {"label": "Number of large eigenvalues", "buttons": [], "elem_id": "split"}
                split = gr.Slider(1, first.channels - 1, value=1, step=1, **options)
                predictions = gr.HTML(elem_id="answers")
                with gr.Tab("Saliency maps", elem_id="tab-maps"):
                    maps = gr.HTML(elem_id="maps")
                with gr.Tab("Perturb the image", elem_id="tab-perturb"):
                    with gr.Row():
                        toward = gr.Radio(list(DIRECTIONS), value="small", label="Toward eigenvalues", elem_id="toward")
                        steps = gr.Slider(10, limits.MAX_STEPS, value=200, step=10, label="Steps", elem_id="steps")
                        lr = gr.Slider(0.005, 0.2, value=0.02, step=0.005, label="Learning rate", elem_id="lr")
                    with gr.Row():
                        start = gr.Button("Start", variant="primary", elem_id="start")
                        stop = gr.Button("Stop", variant="stop", elem_id="stop")
                    perturbed = gr.HTML(elem_id="perturbed")
                with gr.Row():
                    save_panel = gr.Button("Save the maps (PNG)", size="sm", elem_id="save-panel")
                    save_table = gr.Button("Save the numbers (CSV)", size="sm", elem_id="save-table")
                    copy = gr.Button("Copy a link to this view", size="sm", elem_id="copy")
        image, query, file = (gr.Textbox(visible=False) for _ in range(3))

        chosen = [model, image, split, rules, custom, target, cut, scale]
        # without gradio's preprocessing, which refuses a split out of range; View.from_controls moves it into the range
        quick: dict[str, Any] = {"fn": page.glance, "inputs": chosen, "preprocess": False}
        quick |= {"outputs": [numbers, spectrum, predictions, query], "show_progress": "hidden"}
        quick |= {"concurrency_limit": limits.CONCURRENCY, "concurrency_id": "glance"}
        slow = {**quick, "fn": page.maps, "outputs": maps, "show_progress": "minimal"}
        slow |= {"concurrency_limit": limits.CONCURRENT_MAPS, "concurrency_id": "maps"}
        address: dict[str, Any] = {"fn": None, "inputs": query, "js": _SET_ADDRESS, **_PRIVATE}
        hidden: dict[str, Any] = {"show_progress": "hidden", **_PRIVATE}

        def show_all(event: Any) -> None:
            """After an event, show the image, then what is quick, and the maps."""
            shown = event.then(page.picture, [model, image], picture, **hidden)
            shown.then(**quick, **_PRIVATE).then(**address)
            shown.then(**slow, **_PRIVATE)

        changed = [image, split, custom, target, label, gallery]
        show_all(blocks.load(page.restore, None, [model, rules, cut, scale, *changed], **hidden))
        show_all(model.input(page.change_model, [model, image, split, query], changed, **_PRIVATE))
        label.input(page.gallery, [model, label], gallery, **hidden)
        show_all(gallery.select(page.choose, [model, label], image, **hidden))
        uploaded = upload.upload(page.upload, [model, upload], [image, upload], show_progress="minimal", **_PRIVATE)
        show_all(uploaded)
        uploaded.failure(lambda: None, None, upload, **_PRIVATE)  # after a refused file, the next one can be uploaded
        # the last position of a moved slider is always answered, those before if there is time
        split.input(**quick, trigger_mode="always_last", api_name="split_glance").then(**address)
        split.input(**slow, trigger_mode="always_last", api_name="split_maps")
        for choice in (rules.input, target.input, cut.input, scale.input, custom.submit, custom.blur):
            choice(**quick, trigger_mode="always_last", **_PRIVATE).then(**address)
            choice(**slow, trigger_mode="always_last", **_PRIVATE)

        run: dict[str, Any] = {"concurrency_limit": limits.MAX_RUNS, "trigger_mode": "once", **hidden}
        start.click(page.perturb, [*chosen, toward, steps, lr], perturbed, **run)
        stop.click(page.stop, None, None, queue=False, **hidden)
        blocks.unload(page.stop)
        for button, handler in ((save_panel, page.save_panel), (save_table, page.save_table)):
            saved = button.click(handler, chosen, file, show_progress="minimal", concurrency_limit=2, **_PRIVATE)
            saved.then(None, file, js=_SAVE, **_PRIVATE)
        copy.click(None, js=_COPY_ADDRESS, **_PRIVATE)
    return blocks
