"""Exported models give the scores of PyTorch's own route through the eigensolver, and models are left as they were."""

import json
import math
import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import eigengrain
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

SMALL = "test_resnet"  # a ResNet of half a million parameters
FIRST = ("mpncov+seb", "isqrt+seb", "bcnn", "cbp")
OTHERS = sorted(set(list_heads()) - {*FIRST, "gp"})


def trained_like(backbone=SMALL, head="mpncov+seb", reduce=12, **options):
    """A model whose statistics fit its features, in training mode so that exporting has something to restore."""
    torch.manual_seed(0)
    options = {"num_classes": 10, "last_stride": 1, **options}
    model = create_model(backbone, head=head, reduce=reduce, **options).train()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        model.head.reduce(model.forward_features(torch.randn(8, 3, 64, 64)))
    for norm in norms:
        norm.momentum = 0.1
    return model


@torch.no_grad()
def scores(model, x):
    """Of PyTorch, through the eigensolver; the model's mode and its first warning are put back."""
    model.eval()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "_rank_warned", True)
        out = model(x)
    model.train()
    return out


def relative(got, expected):
    """The largest error of a sample."""
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
def test_onnx_on_resnet18(head, tmp_path):
    """cbp at 512 channels and 16 positions: PyTorch goes through Fourier transforms there, the file must not."""
    model = trained_like("resnet18", head, reduce=None if head in ("bcnn", "cbp") else 64)
    session = check_onnx(model, tmp_path / "model.onnx")
    # of what adds up in shared bins, ONNX Runtime's ScatterND loses some where it has several threads
    assert not {"ScatterND", "DFT"} & operators(tmp_path / "model.onnx")
    if head == "mpncov+seb":
        (got,) = session.run(None, {"image": images(3).numpy()})
        assert relative(got, paper_in_numpy(model.eval(), images(3))) < 1e-5


@torch.no_grad()
def paper_in_numpy(model, x):
    """Scores of A = (1 + s) Q with s² = Σ λ e^{−2λ}, from the eigenvalues of the covariance, in float64 after the map."""
    vectors = []
    for sample in model.head.reduce(model.forward_features(x)).flatten(2).double().numpy():
        centred = sample - sample.mean(1, keepdims=True)
        eigenvalues, u = np.linalg.eigh(centred @ centred.T / sample.shape[1])
        eigenvalues = np.clip(eigenvalues, 0, None)
        s = np.sqrt((eigenvalues * np.exp(-2 * eigenvalues)).sum())
        vectors.append(((1 + s) * (u * np.sqrt(eigenvalues)) @ u.T)[np.triu_indices(len(sample))])
    weight, bias = (p.double().numpy() for p in model.classifier.parameters())
    return np.stack(vectors) @ weight.T + bias


def test_numbers_keep_their_digits(tmp_path):
    """The exporter rounds them to float32, with which the iteration of the root may diverge at short rank."""
    export_onnx(trained_like(head="mpncov+seb"), tmp_path / "model.onnx", img_size=64, verify=False)
    graph = onnx.load(tmp_path / "model.onnx").graph
    values = [onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer]
    written = {float(number) for array in values if array.dtype == np.float64 for number in array.flat}
    assert {c for row in products.QUINTIC for c in row} <= written
    assert {1 / math.factorial(k) for k in range(1, 8)} <= written


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


def test_an_onnx_file_describes_itself(tmp_path):
    model = trained_like(head="isqrt", reduce=6, num_classes=2)
    model.class_names = ["sparrow", "Zaunkönig"]
    model.pretrained_cfg |= {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6), "crop_pct": 0.8}
    report = export_onnx(model, tmp_path / "deep" / "model.onnx", img_size=(64, 96))
    assert str(report).splitlines() == [
        f"{report.path}: ONNX, opset 20, {report.path.stat().st_size / 1e6:.1f} MB, input batch × 3 × 64 × 96",
        f"relative error against PyTorch: {report.relative_error:.1e}",
    ]

    session = onnxruntime.InferenceSession(report.path, providers=["CPUExecutionProvider"])
    (image,), (logits,) = session.get_inputs(), session.get_outputs()
    assert (image.name, image.type, image.shape) == ("image", "tensor(float)", ["batch", 3, 64, 96])
    assert (logits.name, logits.type, logits.shape) == ("logits", "tensor(float)", ["batch", 2])
    said = session.get_modelmeta().custom_metadata_map
    assert said == metadata(model, (64, 96))
    assert json.loads(said["class_names"]) == ["sparrow", "Zaunkönig"]
    assert (json.loads(said["mean"]), json.loads(said["std"])) == ([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    assert (json.loads(said["input_size"]), said["crop_pct"]) == ([3, 64, 96], "0.8")
    assert (said["backbone"], said["head"], said["eigengrain"]) == (SMALL, "isqrt", eigengrain.__version__)

    graph = onnx.load(report.path).graph
    products = [node for node in graph.node if node.op_type == "MatMul"]
    doubles = {v.name for v in graph.value_info if v.type.tensor_type.elem_type == onnx.TensorProto.DOUBLE}
    assert len(products) > 10
    assert all(node.output[0] in doubles for node in products)  # the spectral part, in double
    # nothing of the machine that wrote it
    assert str(Path(eigengrain.__file__).parent).encode() not in report.path.read_bytes()


def test_the_description_has_the_eigenvalues_that_are_kept_by_now():
    model = create_model("test_resnet", head="mpncov", num_classes=2, reduce=4, head_options={"subset": "top:2"})
    model.head.subset = "all"  # as an export asks for
    assert json.loads(metadata(model)["head_options"]) == {"subset": "all"}


def test_a_fixed_batch_and_no_classifier(tmp_path):
    model = trained_like(head="gap", reduce=None, num_classes=0)
    report = export_onnx(model, tmp_path / "model.onnx", img_size=64, batch=2, dynamic_batch=False)
    assert report.input_shape == (2, 3, 64, 64)
    session = onnxruntime.InferenceSession(report.path)
    (image,), (vector,) = session.get_inputs(), session.get_outputs()
    assert image.shape == [2, 3, 64, 64]
    assert (vector.name, vector.shape) == ("vector", [2, model.head_hidden_size])


# --- torch.export ------------------------------------------------------------------------------------------------


def test_programs_need_nothing_of_this_package():
    program = export_program(trained_like(), img_size=64)
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert any("bmm" in target for target in targets)
    assert not [target for target in targets if "eigengrain" in target or "linalg" in target or "eigh" in target]


def test_a_program_keeps_the_weights_of_its_time():
    model = trained_like()
    program = export_program(model, images(1)).module()
    expected = {batch: scores(model, images(batch)) for batch in (1, 3)}
    nn.init.zeros_(model.classifier.weight)
    for batch in (1, 3):
        assert relative(program(images(batch)), expected[batch]) < 1e-6


def test_programs_in_files(tmp_path):
    model = trained_like()
    report = export_pt2(model, tmp_path / "model.pt2", img_size=64)
    assert report.relative_error < 1e-6
    assert (report.opset, report.bytes) == (None, report.path.stat().st_size)
    assert str(report).startswith(f"{report.path}: torch.export program")
    program = load_program(report.path).module()
    for batch in (1, 3):
        assert relative(program(images(batch)), scores(model, images(batch))) < 1e-6
    assert read_metadata(report.path) == metadata(model, 64)

    for damaged in ("missing.pt2", "empty.pt2"):
        (tmp_path / "empty.pt2").write_bytes(b"")
        with pytest.raises(ValueError, match="is not a file of export_pt2"):
            load_program(tmp_path / damaged)


# --- the copy that is exported -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head, options",
    [
        *((head, {}) for head in exportable_heads()),
        ("mpncov", {"gradient": "pade"}),
        ("mpncov+seb", {"path": "scaled", "isometric": True}),
        *(("mpncov+seb", {"factor": factor}) for factor in ("q", "constant", "mlp-matrix")),
        ("isqrt+seb", {"factor": "q"}),
        ("logcov", {"epsilon": 1e-6}),
        ("cbp", {"out_features": 300}),
        ("kp", {"order": 3, "sizes": [300, 256]}),
        ("monet", {"compact": False}),
        ("run", {"compact": True, "out_features": 300}),
    ],
    ids=str,
)
def test_heads_by_matrix_products(head, options):
    """In double, so that what is seen is the method: as many positions as make one covariance regular, one singular."""
    model = trained_like(head=head, head_options=options).double().eval()
    deployed = deployable(model).double()
    for size in (64, 160):
        x = images(2, size).double()
        with torch.no_grad():
            assert relative(deployed(x), scores(model, x)) < 1e-6


def test_every_head_but_gp_can_leave():
    assert set(list_heads()) - set(exportable_heads()) == {"gp"}


def test_the_model_is_left_as_it_was(tmp_path):
    model = trained_like(head_options={"gradient": "taylor"})
    model.backbone.layer1.eval()  # frozen, as some recipes have it
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
    with pytest.raises(ValueError, match="cannot be exported"):
        export_onnx(model, tmp_path / "model.onnx", img_size=64)
    check()
    assert str(model.head.subset) == "top:3"


def test_noise_is_the_same_whatever_the_default_device_is():
    images = export._Images(3, (8, 8), None)
    with torch.device("meta"):
        noise = images.noise(2)
    assert torch.equal(noise, images.noise(2))


def test_another_default_dtype_is_no_hindrance(tmp_path):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = create_model("test_resnet", head="mpncov", num_classes=2, reduce=4, last_stride=1)
        report = export_pt2(model, tmp_path / "model.pt2", img_size=64)
    finally:
        torch.set_default_dtype(before)
    assert report.relative_error < 1e-5
    assert load_program(tmp_path / "model.pt2").module()(torch.zeros(3, 3, 64, 64)).dtype == torch.float32


def test_half_precision_is_exported_in_single():
    model = trained_like().bfloat16()
    assert {parameter.dtype for parameter in deployable(model).parameters()} == {torch.float32}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "head, options, message",
    [
        ("gp", {}, r"made of eigenvectors, .*: use another head\. Heads that can: bcnn, .*mpncov\+seb.* run$"),
        ("mpncov", {"subset": "top:3"}, r"subset of eigenvalues, 'top:3', .*: set head\.subset = 'all'$"),
        ("mpncov", {"normalise": "power"}, r"normalise='power' needs eigenvalues: use normalise='sqrt'$"),
        ("mpncov+seb", {"factor": "s"}, r"factor='s' needs eigenvalues: use factor='qs'"),
        ("isqrt+seb", {"factor": "mlp-eigenvalues"}, r"factor='mlp-eigenvalues' needs eigenvalues: use factor='qs'"),
        ("kp", {"order": 3, "sizes": [256, 300]}, r"order 3 and length 300 .*: use a length that is a power of 2$"),
        ("logcov", {"epsilon": 1e-10}, r"epsilon=1e-10 is too ill-conditioned .* at least 1\.2e-09$"),
    ],
)
def test_heads_that_cannot(head, options, message, tmp_path):
    model = trained_like(head=head, head_options=options)
    for attempt in (
        lambda: export_onnx(model, tmp_path / "model.onnx", img_size=64),
        lambda: export_pt2(model, tmp_path / "model.pt2", img_size=64),
        lambda: export_program(model, img_size=64),
    ):
        with pytest.raises(ValueError, match=f"^head '{re.escape(head)}' cannot be exported: .*{message}") as caught:
            attempt()
        assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


# --- mistakes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        ({"opset": 17}, r"opset must be from 18 to 25, got 17"),
        ({"path": "model.pb"}, r"must be named \*\.onnx, got '.*model\.pb'"),
        ({"path": "folder.onnx"}, r"folder\.onnx' is a folder"),
        ({"path": "file/model.onnx"}, r"cannot make the folder '.*file' "),
        ({"img_size": 0}, r"img_size must be at least 1, got 0"),
        ({"batch": 0}, r"batch must be at least 1, got 0"),
    ],
)
def test_options_that_do_not_fit(options, message, tmp_path):
    (tmp_path / "folder.onnx").mkdir()
    (tmp_path / "file").touch()
    options = {"img_size": 64, **options, "path": tmp_path / options.get("path", "model.onnx")}
    with pytest.raises(ValueError, match=message):
        export_onnx(trained_like(head="gap", reduce=None), **options)


def test_images_that_do_not_fit():
    with pytest.raises(ValueError, match=r"does not take images of shape \(3, 8, 8\): .* choose another image size"):
        export_program(create_model("tv:alexnet", head="gap", num_classes=2), img_size=8)
    with pytest.raises(ValueError, match=r"does not take images of shape \(3, 96, 96\): .* choose another image size"):
        export_program(create_model("halonet26t", head="gap", num_classes=2), img_size=96)  # by an assertion of its own
    with pytest.raises(ValueError, match="was built for images of 224 × 224, got 64 × 64"):
        export_program(create_model("vit_tiny_patch16_224", head="gap", num_classes=2), img_size=64)


def test_what_is_no_model():
    with pytest.raises(ValueError, match=r"takes a model of create_model, got DataParallel: .*model\.module"):
        export_program(nn.DataParallel(trained_like(head="gap", reduce=None)))


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_missing_packages(package, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "find_spec", lambda name: None if name == package else object())
    with pytest.raises(ValueError, match=rf"^ONNX export needs {package}: pip install 'eigengrain\[export\]'$"):
        export_onnx(trained_like(head="gap", reduce=None), tmp_path / "model.onnx")


def test_scores_that_differ_leave_no_file(tmp_path, monkeypatch):
    def wrong(model):  # other weights than those that the file is compared with
        copy = deployable(model)
        for parameter in copy.classifier.parameters():
            parameter.mul_(1.001)
        return copy

    monkeypatch.setattr(export, "deployable", wrong)
    path = tmp_path / "model.onnx"
    path.write_text("an older file")
    with pytest.raises(ValueError, match=r"differ from PyTorch's by 1\.0e-03 on noise, more than 1e-04: no file"):
        export_onnx(trained_like(head="gap", reduce=None), path, img_size=64)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.read_text() == "an older file"


def test_scores_that_are_not_finite_are_refused(tmp_path):
    model = trained_like(head="gap", reduce=None)
    with torch.no_grad():
        model.classifier.bias[0] = torch.nan
    with pytest.raises(ValueError, match="by nan on noise"):
        export_pt2(model, tmp_path / "model.pt2", img_size=64)


def test_an_operation_that_onnx_does_not_have(tmp_path):
    class Odd(nn.Module):
        def forward(self, x):
            return x + torch.linalg.eigvalsh(x.flatten(1) @ x.flatten(1).mT).sum()

    model = trained_like(head="gap", reduce=None)
    model.backbone.layer1 = Odd()
    with pytest.raises(ValueError, match=r"an operation of backbone 'test_resnet' or head 'gap' has no form in ONNX"):
        export_onnx(model, tmp_path / "model.onnx", img_size=64, dynamic_batch=False)


# --- what PyTorch's exporter lacks -------------------------------------------------------------------------------


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
    """The eigensolver is one opaque operator of the graph; products are many plain ones. No graph break in either."""
    model = trained_like(head_options={"solver": solver})
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
    model = trained_like(head_options={"solver": solver}).eval()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert relative(compiled(images(2)), model(images(2))) < 1e-6
