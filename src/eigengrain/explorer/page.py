"""The page: its controls, and the functions that handle their events. :class:`Session` does the work."""

import base64
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
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
from eigengrain.explorer.limits import BoundedCache, BusyError, image_bytes, open_upload
from eigengrain.explorer.perturbation import PerturbationRun
from eigengrain.explorer.session import EXAMPLE, KINDS, Analysis, Session, spectrum_facts
from eigengrain.explorer.view import FIRST_KINDS, PREDICTED, View
from eigengrain.names import CUTS, DIRECTIONS, SCALES
from eigengrain.pages import TEMPLATES

STYLE = (TEMPLATES / "explorer" / "style.css").read_text(encoding="utf-8")
#: enlarges a picture that is clicked
ZOOM = (TEMPLATES / "explorer" / "zoom.js").read_text(encoding="utf-8")
TITLE = "What large and small eigenvalues see"
ABOUT = (
    "What the model answers, and why: the covariance of an image's features is split into its large and its small "
    "eigenvalues, and each part answers alone."
)

#: examples of a class, and mistakes, in the galleries
GALLERY_SIZE, MISTAKES = 12, 12
#: seconds of a search for mistakes, and between two updates of the page
SEARCH_SECONDS, UPDATE_SECONDS = 15.0, 1.0

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
    def answer(self, model: object, image: object, other: object) -> str:
        """The answer of the model, beside that of the other one."""
        session = self.session(model)
        compared = self.sessions.get(str(other))
        sessions = [session] if compared is None or compared is session else [session, compared]
        return render.answers([(each, each.analyse_of(session, str(image))) for each in sessions])

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
        """The maps of the view."""
        try:
            session, view = self.view(*values)
        except ValueError:
            return gr.skip()  # glance, which runs at the same time, shows the error
        return render.maps(self._explain(session, view), session.subsets(view.split, view.custom), view.scale)

    def _explain(self, session: Session, view: View) -> Explained:
        subsets = list(session.subsets(view.split, view.custom).values())
        return session.explain(session.analyse(view.image), subsets, view.maps, view.target_class, view.cut)

    # Choices

    def restore(self, request: gr.Request) -> list[Any]:
        """Values of all controls from the address."""
        view = View.from_query(dict(request.query_params), self.sessions)
        return [view.model, list(view.maps), view.cut, view.scale, *self._controls(view)]

    @_show_errors
    def change_model(self, model: object, image: object, other: object, query: object) -> list[Any]:
        """Show the same view with another model, as far as it has the same image and number of eigenvalues.

        A dropdown that is closed without a new choice sends its value too: nothing changes if it is the model of ``query``.
        """
        session = self.session(model)
        former = dict(parse_qsl(str(query)))
        if former.get("model") == session.name:
            return [gr.skip() for _ in range(7)]
        words = {"model": session.name, "image": str(image), "other": str(other)}
        view = View.from_query(words, self.sessions)
        view = replace(view, split=self._split(query, session, session.analyse(view.image)))
        # keep a subset that the visitor wrote; replace the former model's own subset by that of the new model
        left = self.sessions.get(former.get("model", ""))
        untouched = left is None or former.get("custom", "") == left.own_subset
        controls = self._controls(view)
        return controls if untouched else [*controls[:2], gr.skip(), *controls[3:]]

    def _split(self, query: object, session: Session, analysis: Analysis) -> int:
        """The split after a change of the image or the model: that of the visitor, unless it was or is now a default."""
        former = dict(parse_qsl(str(query)))
        left, split = self.sessions.get(former.get("model", "")), former.get("split", "")
        try:
            chosen = left is not None and int(split) != left.default_split(left.analyse(former.get("image", "")))
        except ValueError:
            chosen = False  # no split, or an upload that is no longer in memory
        return int(split) if chosen and int(split) < analysis.rank else session.default_split(analysis)

    def _controls(self, view: View) -> list[Any]:
        """Image, split, custom subset, target, class and images of the gallery, and the other model."""
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
            gr.Dropdown(choices=self.others(session), value=view.other),
        ]

    def others(self, session: Session) -> list[tuple[str, str]]:
        return [("none", ""), *((name, name) for name in self.sessions if name != session.name)]

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
    def choose(self, model: object, label: object, query: object, event: gr.SelectData) -> tuple[str, int]:
        """The key and the split of the example that was clicked."""
        return self._chosen(model, self._gallery_numbers(self.session(model), label), query, event)

    @_show_errors
    def choose_mistake(self, model: object, query: object, event: gr.SelectData) -> tuple[str, int]:
        return self._chosen(model, [mistake.number for mistake in self.session(model).mistakes], query, event)

    def _chosen(self, model: object, numbers: Sequence[int], query: object, event: gr.SelectData) -> tuple[str, int]:
        if not isinstance(event.index, int) or not 0 <= event.index < len(numbers):
            raise ArgumentError("example", "does not exist")
        session = self.session(model)
        analysis = session.analyse(f"{EXAMPLE}{numbers[event.index]}")
        return analysis.key, self._split(query, session, analysis)

    def mistakes(self, model: object) -> Iterator[tuple[list[tuple[Image.Image, str]], str]]:
        """Search for mistakes, and show them with the true and the predicted class."""
        session, shown = self.sessions.get(str(model)), time.monotonic()
        if session is None:
            return
        try:
            for _ in session.find_mistakes(MISTAKES, SEARCH_SECONDS):
                if time.monotonic() - shown > UPDATE_SECONDS:
                    yield self._mistakes(session)
                    shown = time.monotonic()
        except BusyError:
            pass  # other visitors have priority
        yield self._mistakes(session)

    def _mistakes(self, session: Session) -> tuple[list[tuple[Image.Image, str]], str]:
        names = session.classes
        tiles = [(session.thumbnail(n), f"{names[label]} → {names[wrong]}") for n, label, wrong in session.mistakes]
        return tiles, render.mistakes(session)

    @_show_errors
    def upload(self, model: object, path: str | None, query: object) -> tuple[str, int, None]:
        """The key and the split of an uploaded image; the file is deleted."""
        if not path:
            raise ArgumentError("file", "is missing")
        file, session = Path(path).resolve(), self.session(model)
        try:
            analysis = session.upload(self._open(path), f"uploaded: {file.name}")
        finally:
            if file.is_relative_to(self.uploads.resolve()):
                file.unlink(missing_ok=True)
        return analysis.key, self._split(query, session, analysis), None

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
    """Lay out the page and connect its events. On a phone, style.css puts the answer first and the settings last."""
    first = next(iter(page.sessions.values()))
    tiles: dict[str, Any] = {"show_label": False, "interactive": False, "buttons": [], "allow_preview": False}
    tiles |= {"columns": 4, "height": "auto", "object_fit": "cover"}
    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=(600, 3600)) as blocks:
        with gr.Row(equal_height=True):
            with gr.Column(scale=3, elem_id="title"):
                gr.Markdown(f"# {TITLE}\n{ABOUT}")
            model = gr.Dropdown(list(page.sessions), value=first.name, label="Model", elem_id="model", scale=1)
            several = len(page.sessions) > 1
            others: dict[str, Any] = {"label": "Compare with", "elem_id": "other", "scale": 1, "visible": several}
            other = gr.Dropdown(page.others(first), value="", **others)
        with gr.Row(elem_id="layout"):
            with gr.Column(scale=1, min_width=300, elem_id="side"):
                with gr.Column(elem_id="choose"):
                    label = gr.Dropdown(page.classes(first), value=0, label="Examples of class", elem_id="class")
                    gallery = gr.Gallery(elem_id="gallery", **tiles)
                    searched = gr.HTML(elem_id="searched")
                    mistakes = gr.Gallery(elem_id="mistakes", **tiles)
                    megabytes = limits.MAX_BYTES // 2**20
                    upload = gr.File(label=f"Your own image, up to {megabytes} MB", height=140, elem_id="upload")
                with gr.Column(elem_id="settings"):
                    kinds = gr.CheckboxGroup(
                        [(render.KIND_TITLES[kind], kind) for kind in KINDS],
                        value=list(FIRST_KINDS),
                        label="Maps to show",
                        info="Smooth maps show where the model looks. The others show single pixels, by the rule for the "
                        "gradient at the ReLUs; deconv and guided drop negative gradients.",
                        elem_id="kinds",
                    )
                    target = gr.Dropdown(
                        page.targets(first),
                        value=PREDICTED,
                        label="Class to explain",
                        info="The maps show the evidence for this class.",
                        elem_id="target",
                    )
                    custom = gr.Textbox(
                        label="Your own part of the eigenvalues",
                        info="top:k is the k largest, last:k the k smallest; join parts with +.",
                        placeholder="for example top:1+last:12",
                        max_length=limits.MAX_TEXT,
                        submit_btn="Apply",
                        elem_id="custom",
                    )
                    cut = gr.Radio(
                        [("turn with the image (exact)", CUTS[0]), ("are held fixed (projector)", CUTS[1])],
                        value=CUTS[0],
                        label="The directions that a part keeps",
                        info="If the gap at the split is small, exact maps can show mostly how the directions turn.",
                        elem_id="cut",
                    )
                    scales = [("the same for the maps of a row", SCALES[0]), ("one for each map", SCALES[1])]
                    scale = gr.Radio(scales, value=SCALES[0], label="Colour scale", elem_id="scale")
            with gr.Column(scale=3, min_width=520, elem_id="main"):
                answer = gr.HTML(elem_id="answer")
                with gr.Column(elem_id="work"):
                    spectrum = gr.HTML(elem_id="spectrum")
                    # without its reset button, which would move the slider without an event
                    options: dict[str, Any] = {"label": "Number of large eigenvalues", "buttons": [], "elem_id": "split"}
                    split = gr.Slider(1, first.channels - 1, value=1, step=1, **options)
                    numbers = gr.HTML(elem_id="numbers")
                    predictions = gr.HTML(elem_id="parts")
                    with gr.Tab("Maps of the parts", elem_id="tab-maps"):
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

        chosen = [model, image, split, kinds, custom, target, cut, scale, other]
        # without gradio's preprocessing, which refuses a split out of range; View.from_controls moves it into the range
        quick: dict[str, Any] = {"fn": page.glance, "inputs": chosen, "preprocess": False}
        quick |= {"outputs": [numbers, spectrum, predictions, query], "show_progress": "hidden"}
        quick |= {"concurrency_limit": limits.CONCURRENCY, "concurrency_id": "glance"}
        slow = {**quick, "fn": page.maps, "outputs": maps, "show_progress": "minimal"}
        slow |= {"concurrency_limit": limits.CONCURRENT_MAPS, "concurrency_id": "maps"}
        address: dict[str, Any] = {"fn": None, "inputs": query, "js": _SET_ADDRESS, **_PRIVATE}
        hidden: dict[str, Any] = {"show_progress": "hidden", **_PRIVATE}
        first_answer: dict[str, Any] = {"fn": page.answer, "inputs": [model, image, other], "outputs": answer, **hidden}
        search: dict[str, Any] = {"fn": page.mistakes, "inputs": model, "outputs": [mistakes, searched], **hidden}

        def show_all(event: Any) -> Any:
            """After an event, show the answer, then what is quick, and the maps."""
            shown = event.then(**first_answer)
            shown.then(**quick, **_PRIVATE).then(**address)
            return shown.then(**slow, **_PRIVATE)

        changed = [image, split, custom, target, label, gallery, other]
        show_all(blocks.load(page.restore, None, [model, kinds, cut, scale, *changed], **hidden)).then(**search)
        another = model.input(page.change_model, [model, image, other, query], changed, **_PRIVATE)
        show_all(another).then(**search)
        other.input(**first_answer).then(**quick, **_PRIVATE).then(**address)
        label.input(page.gallery, [model, label], gallery, **hidden)
        show_all(gallery.select(page.choose, [model, label, query], [image, split], **hidden))
        show_all(mistakes.select(page.choose_mistake, [model, query], [image, split], **hidden))
        sent = [model, upload, query]
        uploaded = upload.upload(page.upload, sent, [image, split, upload], show_progress="minimal", **_PRIVATE)
        show_all(uploaded)
        uploaded.failure(lambda: None, None, upload, **_PRIVATE)  # after a refused file, the next one can be uploaded
        # the last position of a moved slider is always answered, those before if there is time
        split.input(**quick, trigger_mode="always_last", api_name="split_glance").then(**address)
        split.input(**slow, trigger_mode="always_last", api_name="split_maps")
        for choice in (kinds.input, target.input, cut.input, scale.input, custom.submit, custom.blur):
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
