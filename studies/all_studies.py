"""All studies: their texts, and the rows of most of them, are in ``studies.yaml``, their reports here."""

from functools import partial

from eigengrain.errors import UnknownName
from studies import accuracy, comparison, learning, spectra, speed
from studies.accuracy import COVARIANCE_HEADS, accuracy_report, table_rows
from studies.settings import ACTIONS, FINE_GRAINED, PAPER, TEXTS
from studies.study import MakeReport, MakeRows, Study

#: rows that are not in the file
_ROWS: dict[str, MakeRows] = {
    "gcp-methods": accuracy.gcp_methods,
    "branch": comparison.branch_rows,
    "recipe": comparison.recipe_rows,
    "truncation": learning.truncation_rows,
    "rates": learning.rate_rows,
    "calibration": learning.calibration_rows,
    "transformers": accuracy.transformers,
    "architectures": partial(table_rows, "table_5", "densenet169", COVARIANCE_HEADS, FINE_GRAINED),
    "speed": lambda setup: [],
    "sota": partial(table_rows, "table_4", "efficientnet_b5", ("mpncov", "mpncov+seb"), PAPER["larger"]),
    "imagenet": accuracy.imagenet,
    "gcp-pretrained": accuracy.gcp_pretrained,
}
#: reports that are more than a table of accuracies
_REPORTS: dict[str, MakeReport] = {
    "spectrum": spectra.spectrum_report,
    "subset-accuracy": spectra.subset_report,
    "similarity": spectra.similarity_report,
    "gcp-methods": accuracy.gcp_methods_report,
    "branch": comparison.branch_report,
    "recipe": comparison.recipe_report,
    "truncation": learning.truncation_report,
    "rates": learning.rate_report,
    "calibration": learning.calibration_report,
    "normalisation": learning.normalisation_report,
    "curves": learning.curve_report,
    "speed": speed.speed_report,
    "imagenet": learning.imagenet_report,
}
STUDIES = tuple(
    Study(
        name,
        **{key: value for key, value in texts.items() if key != "rows"},
        all_rows=_ROWS.get(name, partial(accuracy.resnet_rows, name)),
        make_report=_REPORTS.get(name, accuracy_report),
        measure=speed.measure if name == "speed" else None,
    )
    for name, texts in TEXTS.items()
)


def find_study(name: str) -> Study:
    """The study of a name."""
    for study in STUDIES:
        if study.name == name:
            return study
    raise UnknownName("study", name, [*ACTIONS, *TEXTS])
