"""Exported models give the scores of PyTorch with its eigensolver, and exporting does not change a model."""

import copy
import functools
import json
import math
import zipfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import eigengrain
from eigengrain.errors import ArgumentError, FailedError, FileError, MissingPackageError, UnknownName
from eigengrain.functional import matrix_products as products
from eigengrain.heads import list_heads
from eigengrain.models import create_model, export, onnx_file
from eigengrain.models.export import (
    deployable,
    export_onnx,
    export_program,
    export_pt2,
    exportable_heads,
    load_program,
    metadata,
    read_metadata,
)

SMALL = "test_resnet"  # a ResNet with half a million parameters
SMALLEST = "plumage_net"  # two residual blocks, for tests in which the backbone does not matter: tracing takes the time
FIRST = ("mpncov+seb", "isqrt+seb", "bcnn", "cbp")
REFUSED = ("gp", "logchol", "logchol+seb")
OTHERS = sorted(set(list_heads(any_backbone=True)) - {*FIRST, *REFUSED})


@functools.cache
def build(backbone, head, options):
    torch.manual_seed(0)
    model = create_model(backbone, head=head, **json.loads(options)).train()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        model.head.reduce(model.forward_features(torch.randn(8, 3, 64, 64)))
    for norm in norms:
        norm.momentum = 0.1
    return model


#: exported programs compute the head in float64
EXACT = {"dtype": "float64"}


def trained_like(backbone=SMALL, head="mpncov+seb", **options):
    """A model whose batch statistics fit its features, in training mode so that exporting has something to restore.

    Its vectors are calibrated by a factor of 3.
    """
    options = {"num_classes": 10, "last_stride": 1, "reduce": 12, **options}
    model = copy.deepcopy(build(backbone, head, json.dumps(options)))
    model.vector_scale.fill_(3)
    return model


@torch.no_grad()
def scores(model, x):
    """Scores of PyTorch with its eigensolver; the mode and the pending warning of the model are restored."""
    model.eval()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "_rank_warned", True)
        out = model(x)
    model.train()
    return out


def relative(got, expected):
    """The largest relative error of a sample."""
    got, expected = torch.as_tensor(got).double(), torch.as_tensor(expected).double()
    return float(((got - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def images(batch, size=64, seed=5):
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))


def operators(path):
    return {node.op_type for node in onnx.load(path).graph.node}


def check_onnx(model, path, size=64):
    report = export_onnx(model, path, img_size=size, verify=False)
    assert report.relative_error is None
    assert report.bytes == path.stat().st_size
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for batch in (1, 3):
        x = images(batch, size)
        (got,) = session.run(["logits"], {"image": x.numpy()})
        assert got.dtype == np.float32
        assert relative(got, scores(model, x)) < 1e-4
    return session


@pytest.mark.parametrize("head", FIRST)
def test_onnx(head, tmp_path):
    """cbp with 512 channels and 16 positions: PyTorch uses Fourier transforms there, which the file must not."""
    path = tmp_path / "model.onnx"
    model = trained_like("resnet18", head, reduce=None) if head == "cbp" else trained_like(head=head, reduce=64)
    session = check_onnx(model, path)
    # with several threads, ONNX Runtime's ScatterND loses values that are added to the same bin
    assert not {"ScatterND", "DFT"} & operators(path)
    if head == "mpncov+seb":
        (got,) = session.run(["logits"], {"image": images(3).numpy()})
        assert relative(got, paper_in_numpy(model.eval(), images(3))) < 1e-5
        check_digits(path)


def check_digits(path):
    """The exporter rounds constants to float32, with which the iteration of the root can diverge for a short rank."""
    values = [onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer]
    written = {float(number) for array in values if array.dtype == np.float64 for number in array.flat}
    assert {c for row in products.QUINTIC for c in row} <= written
    assert {1 / math.factorial(k) for k in range(1, 8)} <= written


@torch.no_grad()
def paper_in_numpy(model, x):
    """Scores of A = (1 + s) Q with s² = Σ λ e^{−2λ}, from the eigenvalues of the covariance, in float64 from the map on."""
    vectors = []
    for sample in model.head.reduce(model.forward_features(x)).flatten(2).double().numpy():
        centred = sample - sample.mean(1, keepdims=True)
        eigenvalues, u = np.linalg.eigh(centred @ centred.T / sample.shape[1])
        eigenvalues = np.clip(eigenvalues, 0, None)
        s = np.sqrt((eigenvalues * np.exp(-2 * eigenvalues)).sum())
        vectors.append(((1 + s) * (u * np.sqrt(eigenvalues)) @ u.T)[np.triu_indices(len(sample))])
    weight, bias = (p.double().numpy() for p in model.classifier.parameters())
    return float(model.vector_scale) * np.stack(vectors) @ weight.T + bias


def contains_double(path):
    """Whether a tensor, a constant, a cast or a value of an ONNX file is in double."""
    graph = onnx.shape_inference.infer_shapes(onnx.load(path), strict_mode=True).graph
    double = onnx.TensorProto.DOUBLE
    types = {tensor.data_type for tensor in graph.initializer}
    types |= {value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.output)}
    for attribute in (attribute for node in graph.node for attribute in node.attribute):
        types |= {attribute.t.data_type} | ({attribute.i} if attribute.name == "to" else set())
    return double in types


@pytest.mark.parametrize("head", ["mpncov+seb", "isqrt+seb"])
def test_onnx_in_float32(head, tmp_path):
    path, model = tmp_path / "model.onnx", trained_like(head=head, reduce=64)
    assert export_onnx(model, path, img_size=64).relative_error < 1e-4
    assert contains_double(path)
    assert export_onnx(model, path, img_size=64, dtype="float32").relative_error < 1e-4
    assert not contains_double(path)
    if head == "mpncov+seb":
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        (got,) = session.run(["logits"], {"image": images(3).numpy()})
        assert relative(got, paper_in_numpy(model.eval(), images(3))) < 1e-5
        assert model.head.dtype == "auto"


@pytest.mark.parametrize("export_to", [export_onnx, export_pt2])
def test_heads_that_compute_in_double_are_refused_in_float32(export_to, tmp_path):
    path = tmp_path / f"model.{'onnx' if export_to is export_onnx else 'pt2'}"
    with pytest.raises(ArgumentError) as error:
        export_to(trained_like(SMALLEST, "logcov"), path, img_size=48, dtype="float32")
    assert error.value.argument == "dtype"
    assert not path.exists()


def test_unknown_precision():
    with pytest.raises(UnknownName) as error:
        deployable(trained_like(SMALLEST, "gap", reduce=None), dtype="float16")
    assert error.value.kind == "dtype"


@pytest.mark.slow
@pytest.mark.parametrize("head", OTHERS)
def test_onnx_on_resnet18_with_other_heads(head, tmp_path):
    check_onnx(trained_like("resnet18", head, reduce=64), tmp_path / "model.onnx", size=96)


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "convnext_atto", "vgg11"])
def test_onnx_with_other_backbones(backbone, tmp_path):
    built_for = {"img_size": 64} if backbone.startswith(("vit", "swin")) else {}
    model = trained_like(backbone, "mpncov+seb", reduce=64, last_stride=None, **built_for)
    check_onnx(model, tmp_path / "model.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("opset", export.OPSETS)
def test_onnx_in_every_opset(opset, tmp_path):
    report = export_onnx(trained_like(head="isqrt+seb"), tmp_path / "model.onnx", img_size=64, opset=opset)
    assert report.opset == opset
    assert {o.domain: o.version for o in onnx.load(tmp_path / "model.onnx").opset_import}[""] == opset


def test_metadata_of_an_onnx_file(tmp_path):
    model = trained_like(head="isqrt", reduce=6, num_classes=2)
    model.class_names = ["sparrow", "Zaunkönig"]
    model.pretrained_cfg |= {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6), "crop_pct": 0.8}
    report = export_onnx(model, tmp_path / "deep" / "model.onnx", img_size=(64, 96))
    assert str(report).splitlines() == [
        f"{report.path}: ONNX, opset 20, {report.path.stat().st_size / 1e6:.1f} MB, input batch × 3 × 64 × 96",
        f"relative error against PyTorch: {report.relative_error:.1e}",
    ]

    session = onnxruntime.InferenceSession(report.path, providers=["CPUExecutionProvider"])
    (image,), (logits, probabilities) = session.get_inputs(), session.get_outputs()
    assert (image.name, image.type, image.shape) == ("image", "tensor(float)", ["batch", 3, 64, 96])
    assert (logits.name, logits.type, logits.shape) == ("logits", "tensor(float)", ["batch", 2])
    assert (probabilities.name, probabilities.type, probabilities.shape) == ("probabilities", "tensor(float)", ["batch", 2])
    written = session.get_modelmeta().custom_metadata_map
    assert written == metadata(model, (64, 96))
    assert json.loads(written["class_names"]) == ["sparrow", "Zaunkönig"]
    assert (json.loads(written["mean"]), json.loads(written["std"])) == ([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    assert (json.loads(written["input_size"]), written["crop_pct"]) == ([3, 64, 96], "0.8")
    assert (written["backbone"], written["head"], written["eigengrain"]) == (SMALL, "isqrt", eigengrain.__version__)

    graph = onnx.load(report.path).graph
    products = [node for node in graph.node if node.op_type == "MatMul"]
    doubles = {v.name for v in graph.value_info if v.type.tensor_type.elem_type == onnx.TensorProto.DOUBLE}
    assert len(products) > 10
    assert all(node.output[0] in doubles for node in products)  # the spectral part, in double
    # no path of the machine that wrote it
    assert str(Path(eigengrain.__file__).parent).encode() not in report.path.read_bytes()


def test_metadata_has_the_present_subset():
    model = create_model("test_resnet", head="mpncov", num_classes=2, reduce=4, head_options={"subset": "top:2"})
    assert metadata(model)["subset"] == "top:2"
    model.head.subset = "all"  # as export needs it
    assert json.loads(metadata(model)["head_options"]) == {"subset": "all"}
    assert "subset" not in metadata(model)


def test_fixed_batch_and_no_classifier(tmp_path):
    model = trained_like(SMALLEST, head="gap", reduce=None, num_classes=0)
    report = export_onnx(model, tmp_path / "model.onnx", img_size=64, batch=2, dynamic_batch=False)
    assert report.input_shape == (2, 3, 64, 64)
    session = onnxruntime.InferenceSession(report.path)
    (image,), (vector,) = session.get_inputs(), session.get_outputs()
    assert image.shape == [2, 3, 64, 64]
    assert (vector.name, vector.shape) == ("vector", [2, model.head_hidden_size])


# --- torch.export ------------------------------------------------------------------------------------------------


def test_program():
    """It needs nothing of this package, and keeps the weights it was exported with."""
    model = trained_like(head_options=EXACT)
    program = export_program(model, images(1))
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert any("bmm" in target for target in targets)
    assert not [target for target in targets if "eigengrain" in target or "linalg" in target or "eigh" in target]
    expected = {batch: scores(model, images(batch)) for batch in (1, 3)}
    nn.init.zeros_(model.classifier.weight)
    for batch in (1, 3):
        assert relative(program.module()(images(batch)), expected[batch]) < 1e-6


def test_programs_in_files(tmp_path):
    model = trained_like(head_options=EXACT)
    report = export_pt2(model, tmp_path / "model.pt2", img_size=64)
    assert report.relative_error < 1e-6
    assert (report.opset, report.bytes) == (None, report.path.stat().st_size)
    assert str(report).startswith(f"{report.path}: torch.export program")
    program = load_program(report.path).module()
    for batch in (1, 3):
        assert relative(program(images(batch)), scores(model, images(batch))) < 1e-6
    assert read_metadata(report.path) == metadata(model, 64)

    (tmp_path / "empty.pt2").write_bytes(b"")
    for number, content in enumerate(("[1]", "3", "[" * 100_000)):
        with zipfile.ZipFile(tmp_path / f"{number}.pt2", "w") as archive:
            archive.writestr("model/eigengrain.json", content)
    for name in ("missing.pt2", "empty.pt2", "0.pt2", "1.pt2", "2.pt2"):
        with pytest.raises(FileError) as error:
            load_program(tmp_path / name)
        assert error.value.path == tmp_path / name


# --- the copy that is exported -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head, options",
    [
        *((head, {}) for head in exportable_heads() if head in list_heads(any_backbone=True)),
        ("mpncov", {"gradient": "pade"}),
        ("mpncov+seb", {"path": "scaled", "isometric": True}),
        *(("mpncov+seb", {"factor": factor}) for factor in ("q", "constant", "mlp-matrix")),
        ("isqrt+seb", {"factor": "q"}),
        ("logcov", {"epsilon": 1e-6}),
        ("isice", {"iterations": 3, "eta": 20.0, "penalty": 0.1}),
        ("cbp", {"out_features": 300}),
        ("kp", {"order": 3, "sizes": [300, 256]}),
        ("monet", {"compact": False}),
        ("run", {"compact": True, "out_features": 300}),
    ],
    ids=str,
)
def test_heads_by_matrix_products(head, options):
    """In double, so that only the method differs; one size gives a regular covariance, the other a singular one."""
    model = trained_like(head=head, head_options=options).double().eval()
    deployed = deployable(model).double()
    for size in (64, 160):
        x = images(2, size).double()
        with torch.no_grad():
            assert relative(deployed(x), scores(model, x)) < 1e-6


def test_heads_that_can_be_exported():
    assert set(list_heads()) - set(exportable_heads()) == set(REFUSED)


def test_export_does_not_change_the_model(tmp_path):
    model = trained_like(head_options={"gradient": "taylor"})
    model.backbone.layer1.eval()  # frozen, as in some recipes
    model.head.record_spectrum = True
    before = {name: module.training for name, module in model.named_modules()}
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def check():
        assert {name: module.training for name, module in model.named_modules()} == before
        assert (model.head.solver, model.head.gradient.name, model.head.record_spectrum) == ("auto", "taylor", True)
        assert all(parameter.requires_grad for parameter in model.parameters())
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
        assert model.head.last_spectrum is None

    deployed = deployable(model)
    assert deployed.head.solver == "products"
    assert not any(module.training for module in deployed.modules())
    assert not any(parameter.requires_grad for parameter in deployed.parameters())
    check()
    export_pt2(model, tmp_path / "model.pt2", img_size=64)
    check()
    model.head.subset = "top:3"
    with pytest.raises(ArgumentError):
        export_onnx(model, tmp_path / "model.onnx", img_size=64)
    check()
    assert str(model.head.subset) == "top:3"


def test_noise_does_not_depend_on_the_default_device():
    shape = ("batch", 3, 8, 8)
    with torch.device("meta"):
        noise = export._noise(shape, 2)
    assert torch.equal(noise, export._noise(shape, 2))


def test_another_default_dtype(tmp_path):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = create_model("test_resnet", head="isqrt", num_classes=2, reduce=4, last_stride=1)
        report = export_pt2(model, tmp_path / "model.pt2", img_size=64)
    finally:
        torch.set_default_dtype(before)
    assert report.relative_error < 1e-5
    assert load_program(tmp_path / "model.pt2").module()(torch.zeros(3, 3, 64, 64)).dtype == torch.float32


def test_half_precision_is_exported_as_float32():
    model = trained_like().bfloat16()
    assert {parameter.dtype for parameter in deployable(model).parameters()} == {torch.float32}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "head, options, argument",
    [
        ("gp", {}, "head"),
        ("logchol", {}, "normalise"),
        ("mpncov", {"subset": "top:3"}, "subset"),
        ("mpncov", {"normalise": "power"}, "normalise"),
        ("mpncov+seb", {"factor": "s"}, "factor"),
        ("isqrt+seb", {"factor": "mlp-eigenvalues"}, "factor"),
        ("kp", {"order": 3, "sizes": [256, 300]}, "out_features"),
        ("logcov", {"epsilon": 1e-10}, "epsilon"),
    ],
)
def test_heads_that_cannot_be_exported(head, options, argument):
    with torch.device("meta"):
        model = create_model(SMALL, head=head, num_classes=2, reduce=12, head_options=options)
    with pytest.raises(ArgumentError) as error:
        deployable(model)
    reason = error.value.__cause__
    assert isinstance(reason, ArgumentError)
    assert (error.value.argument, reason.argument) == ("model", argument)
    assert reason.remedy
    assert reason.remedy in str(error.value)
    assert ("mpncov+seb" in error.value.remedy) == (head in REFUSED)  # the list of heads that can
    assert "\n" not in str(error.value)


def test_message_for_a_head_that_cannot_be_exported(tmp_path):
    model = trained_like(head="mpncov", head_options={"subset": "top:3"})
    for attempt in (
        lambda: export_onnx(model, tmp_path / "model.onnx", img_size=64),
        lambda: export_pt2(model, tmp_path / "model.pt2", img_size=64),
        lambda: export_program(model, img_size=64),
    ):
        with pytest.raises(ArgumentError, match=r"^model cannot be exported with head 'mpncov': .*top:3"):
            attempt()
    assert not list(tmp_path.iterdir())


# --- mistakes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, argument, value",
    [
        ({"opset": 17}, "opset", 17),
        ({"img_size": 0}, "img_size", 0),
        ({"batch": 0}, "batch", 0),
    ],
)
def test_invalid_options(options, argument, value, tmp_path):
    with pytest.raises(ArgumentError) as error:
        export_onnx(trained_like(head="gap", reduce=None), tmp_path / "model.onnx", **{"img_size": 64, **options})
    assert (error.value.argument, error.value.value) == (argument, value)


def test_paths_that_cannot_be_written(tmp_path):
    model = trained_like(head="gap", reduce=None)
    with pytest.raises(ArgumentError) as error:
        export_onnx(model, tmp_path / "model.pb")
    assert (error.value.argument, error.value.value) == ("path", str(tmp_path / "model.pb"))
    (tmp_path / "folder.onnx").mkdir()
    (tmp_path / "file").touch()
    for path in ("folder.onnx", "file/model.onnx"):
        with pytest.raises(FileError) as error:
            export_onnx(model, tmp_path / path)
        assert error.value.path == tmp_path / path


@pytest.mark.parametrize(
    "name, side, argument",
    [
        ("tv:alexnet", 8, "img_size"),
        ("halonet26t", 96, "img_size"),  # by an assertion of its own
        ("vit_tiny_patch16_224", 64, "x"),
    ],
)
def test_images_that_do_not_fit(name, side, argument):
    with torch.device("meta"):
        model = create_model(name, head="gap", num_classes=2)
    with pytest.raises(ArgumentError) as error:
        export_program(model, img_size=side)
    assert (error.value.argument, error.value.value) == (argument, (side, side))


def test_wrapped_models_are_refused():
    with pytest.raises(ArgumentError) as error:
        export_program(nn.DataParallel(trained_like(head="gap", reduce=None)))
    assert (error.value.argument, error.value.value) == ("model", "DataParallel")


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_missing_packages(package, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "find_spec", lambda name: None if name == package else object())
    with pytest.raises(MissingPackageError) as error:
        export_onnx(trained_like(head="gap", reduce=None), tmp_path / "model.onnx")
    assert error.value.name == package


def test_scores_that_differ_leave_no_file(tmp_path, monkeypatch):
    def wrong(model, dtype):  # not the weights that the file is compared with
        copy = deployable(model, dtype)
        for parameter in copy.classifier.parameters():
            parameter.mul_(1.001)
        return copy

    monkeypatch.setattr(export, "deployable", wrong)
    path = tmp_path / "model.onnx"
    path.write_text("an older file")
    with pytest.raises(FailedError):
        export_onnx(trained_like(SMALLEST, head="gap", reduce=None), path, img_size=64)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.read_text() == "an older file"


def test_scores_that_are_not_finite_are_refused(tmp_path):
    model = trained_like(head="gap", reduce=None)
    with torch.no_grad():
        model.classifier.bias[0] = torch.nan
    with pytest.raises(FailedError):
        export_pt2(model, tmp_path / "model.pt2", img_size=64)


def test_operation_that_onnx_lacks(tmp_path):
    class Odd(nn.Module):
        def forward(self, x):
            return x + torch.linalg.eigvalsh(x.flatten(1) @ x.flatten(1).mT).sum()

    model = trained_like(head="gap", reduce=None)
    model.backbone.layer1 = Odd()
    with pytest.raises(ArgumentError) as error:
        export_onnx(model, tmp_path / "model.onnx", img_size=64, dynamic_batch=False)
    assert error.value.argument == "model"


# --- operations that PyTorch's exporter lacks ----------------------------------------------------------------------


def test_writing_to_a_diagonal(tmp_path):
    class Writes(nn.Module):
        def forward(self, x):
            x = 2 * x
            x.diagonal(dim1=-2, dim2=-1).add_(3.0)
            weights = torch.full((4, 4), 0.5).fill_diagonal_(7.0)
            weights[1:3, 2:] = 0.25
            return x * weights

    example = torch.arange(32.0).reshape(2, 4, 4)
    program = torch.export.export(Writes(), (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    onnx_file.convert(program, "x", "y", opset=20).save(tmp_path / "writes.onnx")
    expected = 2 * example + 3 * torch.eye(4)
    weights = torch.full((4, 4), 0.5)
    weights[range(4), range(4)] = 7.0
    weights[1:3, 2:] = 0.25
    assert torch.equal(onnx_file.runner(tmp_path / "writes.onnx")(example), expected * weights)


# --- torch.compile -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["auto", "products"])
def test_torch_compile(solver):
    """The eigensolver is one custom operator of the graph, products are many plain ones; neither breaks the graph."""
    model = trained_like(SMALLEST, head_options={"solver": solver})
    x = images(2)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    results = []
    for run in (model, compiled):
        model.zero_grad()
        out = run(x)
        out.square().sum().backward()
        results.append((out.detach(), [p.grad.clone() for p in model.parameters()]))
    (expected, expected_grads), (got, grads) = results
    assert relative(got, expected) < 1e-6
    for gradient, reference in zip(grads, expected_grads, strict=True):
        assert (gradient - reference).norm() <= 1e-5 * reference.norm()


@pytest.mark.parametrize("solver", ["auto", "products"])
@torch.no_grad()
def test_torch_compile_without_gradients(solver):
    model = trained_like(SMALLEST, head_options={"solver": solver}).eval()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert relative(compiled(images(2)), model(images(2))) < 1e-6
