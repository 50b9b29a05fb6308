"""Options: read without torch; unknown names and values that do not fit are refused."""

import subprocess
import sys
from dataclasses import fields, is_dataclass
from typing import get_type_hints

import pytest
import yaml

from eigengrain.errors import ArgumentError, UnknownName
from eigengrain.training.config import Data, Model, Optimiser, Schedule, Train, differences, from_mapping, to_mapping


def test_the_options_need_no_torch():
    modules = ("training.config", "recipes", "cli.train", "cli.evaluate")
    code = f"import sys, {', '.join(f'eigengrain.{module}' for module in modules)}"
    done = subprocess.run([sys.executable, "-c", f"{code}; print('torch' in sys.modules)"], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_every_option_is_explained():
    def check(config):
        for field in fields(config):
            assert f"        {field.name}: " in config.__doc__, f"{config.__name__}.{field.name} has no help"
            if is_dataclass(get_type_hints(config)[field.name]):
                check(get_type_hints(config)[field.name])

    check(Train)


def test_yaml_round_trip():
    config = Train(
        data=Data("cars", "somewhere", 0.1),
        model=Model(reduce=None, head_options={"solver": "eigh"}),
        schedule=Schedule(drops=[3, 5]),
        clip_grad=5.0,
        select="best-val",
    )
    text = yaml.safe_dump(to_mapping(config))
    assert from_mapping(yaml.safe_load(text)) == config


@pytest.mark.parametrize(
    ("values", "name", "suggestion"),
    [
        ({"epoch": 3}, "epoch", "epochs"),
        ({"optimiser": {"classifier_lr_scal": 3}}, "optimiser.classifier_lr_scal", "optimiser.classifier_lr_scale"),
        ({"optimizer": {"lr": 3}}, "optimizer", "optimiser"),
        ({"data": {"transforms": {"img_sise": 3}}}, "data.transforms.img_sise", "data.transforms.img_size"),
        ({"amp": "bf61"}, "bf61", "bf16"),
        ({"select": "best"}, "best", "best-val"),
        ({"schedule": {"kind": "cosin"}}, "cosin", "cosine"),
    ],
)
def test_unknown_names_have_suggestions(values, name, suggestion):
    with pytest.raises(UnknownName) as error:
        from_mapping(values)
    assert error.value.name == name
    assert suggestion in error.value.suggestions


@pytest.mark.parametrize(
    ("values", "argument", "value"),
    [
        ({"data": 3}, "data", 3),
        ({"epochs": "many"}, "epochs", "many"),
        ({"epochs": 0}, "epochs", 0),
        ({"epochs": None}, "epochs", None),
        ({"schedule": {"drops": None}}, "schedule.drops", None),
        ({"schedule": {"drops": [5, 3]}}, "schedule.drops", [5, 3]),
        ({"schedule": {"drops": [0]}}, "schedule.drops", [0]),
        ({"schedule": {"kind": "cosine", "drops": [5]}}, "schedule.drops", [5]),
        ({"select": "best-val"}, "select", "best-val"),
        ({"early_stop": 3}, "early_stop", 3),
        ({"schedule": {"kind": "plateau"}}, "schedule.kind", "plateau"),
        ({"accumulate": 4, "save_every": 6}, "save_every", 6),
        ({"accumulate": 2, "cuda_graphs": True}, "cuda_graphs", None),
        ({"ema": 1.0}, "ema", 1.0),
        ({"data": {"val_fraction": 1.0}}, "data.val_fraction", 1.0),
        ({"clip_grad": 0.0}, "clip_grad", 0.0),
        ({"seed": 1 << 64}, "seed", 1 << 64),
        ({"optimiser": {"lr": float("inf")}}, "optimiser.lr", float("inf")),
    ],
)
def test_values_that_do_not_fit_are_refused(values, argument, value):
    with pytest.raises(ArgumentError) as error:
        from_mapping(values)
    assert (error.value.argument, error.value.value) == (argument, value)
    assert "\n" not in str(error.value)


def test_nan_and_reserved_options_of_a_data_set_are_refused():
    with pytest.raises(ArgumentError):
        Optimiser(lr=float("nan"))
    with pytest.raises(ValueError):
        Data(options={"split": "test"})


def test_messages_name_arguments_and_can_name_options():
    with pytest.raises(ArgumentError) as error:
        Train(early_stop=3)
    remedy = "set data.val_fraction, or select to best-test to use the test images"
    assert str(error.value) == f"early_stop needs validation images, got 3: {remedy}"
    assert error.value.describe(lambda name: f"--{name}").startswith(
        "--early_stop needs validation images, got 3: set --data."
    )


def test_options_that_may_change_when_a_run_is_resumed():
    old = to_mapping(Train(data=Data(root="here"), workers=4, out="a", save_every=3))
    new = to_mapping(Train(data=Data(root="there"), workers=0, out="b", resume=True, device="cpu"))
    assert differences(old, new) == []
    assert differences(old, to_mapping(Train(optimiser=Optimiser(lr=1.0), epochs=3))) == ["optimiser.lr", "epochs"]
