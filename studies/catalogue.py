"""All studies, in the order of a campaign: what others build on comes first."""

from collections.abc import Sequence

from eigengrain.errors import UnknownName
from studies import accuracy, eigenvalues, learning, rates, speed
from studies.accuracy import accuracy_findings, gains
from studies.config import STUDY_ACTIONS
from studies.study import Findings, Row, Setup, Study


def _gcp_methods(setup: Setup, rows: Sequence[Row]) -> Findings:
    found = accuracy_findings(setup, rows)
    notes = [*found.notes, *gains(setup, rows)]
    if any(row.data == "cars" for row in rows):
        notes.append("On Cars the paper prints a gain of 1.8 for ResNet-101 beside 93.9 and 91.7.")
    return Findings(found.rows, found.tables, notes, found.draw)


def _larger_sets(setup: Setup, rows: Sequence[Row]) -> Findings:
    found = accuracy_findings(setup, rows)
    others = "TransFG and AFTrans are no part of this package: their lines have the paper's numbers and are never run."
    return Findings(found.rows, found.tables, [*found.notes, others], found.draw)


def _architectures(setup: Setup, rows: Sequence[Row]) -> Findings:
    found = accuracy_findings(setup, rows)
    rank = (
        "Inception V3 cannot do without its last stride: 12 × 12 positions at 448 pixels give 256 channels a rank of 143."
    )
    return Findings(found.rows, found.tables, [*found.notes, rank], found.draw)


def _gcp_pretrained(setup: Setup, rows: Sequence[Row]) -> Findings:
    found = accuracy_findings(setup, rows)
    first = "The lines 'after ImageNet with it' need the models of the study imagenet, in the same --out."
    return Findings(found.rows, found.tables, [*found.notes, first], found.draw)


def _nothing(setup: Setup) -> list[Row]:
    return []


STUDIES = (
    Study(
        "spectrum",
        "eigenvalues and condition numbers, with and without SEB",
        "Figure 6",
        eigenvalues.spectrum_rows,
        eigenvalues.spectrum_findings,
    ),
    Study(
        "subset-accuracy",
        "accuracy with parts of the spectrum in inference",
        "Table 2",
        eigenvalues.subset_rows,
        eigenvalues.subset_findings,
    ),
    Study(
        "similarity",
        "maps of large and small eigenvalues beside those of all",
        "Table 1",
        eigenvalues.similarity_rows,
        eigenvalues.similarity_findings,
    ),
    Study(
        "gcp-methods",
        "covariance pooling methods on three data sets",
        "Table 3",
        accuracy.gcp_methods,
        _gcp_methods,
        thorough=True,
    ),
    Study(
        "truncation",
        "training without the smallest eigenvalues",
        "Figure 1",
        learning.truncation_rows,
        learning.truncation_findings,
    ),
    Study(
        "factors",
        "other scaling factors",
        "Table 7",
        accuracy.factors,
        accuracy_findings,
    ),
    Study(
        "paths",
        "the scaled path alone",
        "Table 6",
        accuracy.paths,
        accuracy_findings,
        thorough=True,
    ),
    Study(
        "rates",
        "accuracy against the rate of the classifier",
        "Tables 3, 6 and 7",
        rates.rate_rows,
        rates.rate_findings,
    ),
    Study(
        "architectures",
        "Inception and DenseNet",
        "Table 5",
        accuracy.architectures,
        _architectures,
    ),
    Study(
        "normalisation",
        "powers, root, logarithm and inverse exponential",
        "Figure 4",
        learning.normalisation_rows,
        learning.normalisation_findings,
    ),
    Study("curves", "test accuracy after each epoch", "Figure 5", learning.curve_rows, learning.curve_findings),
    Study(
        "speed",
        "time and memory of a training step",
        "Table 8",
        _nothing,
        speed.findings,
        measure=speed.measure,
    ),
    Study("sota", "larger data sets, beside transformers", "Table 4", accuracy.larger_sets, _larger_sets),
    Study(
        "imagenet",
        "AlexNet and ResNet-50 from random weights",
        "Tables 9 and 10, Figure 10",
        accuracy.imagenet,
        learning.imagenet_findings,
    ),
    Study(
        "gcp-pretrained",
        "backbones trained on ImageNet with the head",
        "Table 11",
        accuracy.gcp_pretrained,
        _gcp_pretrained,
    ),
)


def find_study(name: str) -> Study:
    """The study of that name.

    Raises:
        ValueError: for an unknown name, with near ones.
    """
    for study in STUDIES:
        if study.name == name:
            return study
    raise UnknownName("study", name, [*STUDY_ACTIONS, *(study.name for study in STUDIES)])
