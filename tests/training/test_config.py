"""Options: read without torch, refused where they are misspelt or make no sense."""

import subprocess
import sys
from dataclasses import fields, is_dataclass
from typing import get_type_hints

import pytest
import yaml

from eigengrain.training.config import Data, Model, Optimiser, Schedule, Train, differences, from_mapping, to_mapping


def test_the_options_need_no_torch():
    modules = ("training.config", "recipes", "commands.train", "commands.evaluate")
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


def test_yaml_there_and_back():
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
    ("values", "said"),
    [
        ({"epoch": 3}, "unknown option 'epoch': did you mean 'epochs'"),
        ({"optimiser": {"classifier_lr_scal": 3}}, "did you mean 'optimiser.classifier_lr_scale'"),
        ({"optimizer": {"lr": 3}}, "unknown option 'optimizer': did you mean 'optimiser'"),
        ({"data": {"transforms": {"img_sise": 3}}}, "did you mean 'data.transforms.img_size'"),
        ({"data": 3}, "data must be a mapping of names to values, got 3"),
        ({"epochs": "many"}, "epochs"),
        ({"epochs": 0}, "--epochs must be a number at least 1, got 0"),
        ({"epochs": None}, "epochs must be an integer, got None"),
        ({"schedule": {"drops": None}}, "schedule.drops must be a list of integers"),
        ({"amp": "bf61"}, "unknown --amp 'bf61': did you mean 'bf16'"),
        ({"select": "best"}, "unknown --select 'best': did you mean 'best-"),
        ({"schedule": {"kind": "cosin"}}, "did you mean 'cosine'"),
        ({"optimiser": {"lr": float("nan")}}, "--optimiser.lr must be a number above 0, got nan"),
        ({"schedule": {"drops": [5, 3]}}, "growing epochs"),
        ({"schedule": {"kind": "cosine", "drops": [5]}}, "belongs to --schedule.kind drops"),
        ({"select": "best-val"}, "set --data.val_fraction"),
        ({"early_stop": 3}, "--early_stop needs something to watch"),
        ({"schedule": {"kind": "plateau"}}, "plateau needs something to watch"),
        ({"accumulate": 4, "save_every": 6}, "must be a multiple of --accumulate 4, got 6"),
        ({"ema": 1.0}, "--ema must lie between 0 and 1"),
        ({"data": {"val_fraction": 1.0}}, "--data.val_fraction must be"),
        ({"data": {"options": {"split": "test"}}}, "split is no option of a data set"),
        ({"clip_grad": 0.0}, "--clip_grad must be a number above 0"),
        ({"seed": 1 << 64}, "--seed must be below 2**64, got 18446744073709551616"),
    ],
)
def test_mistakes_are_refused_with_what_is_near(values, said):
    with pytest.raises(ValueError) as error:
        from_mapping(values)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_what_may_change_when_a_run_goes_on():
    old = to_mapping(Train(data=Data(root="here"), workers=4, out="a", save_every=3))
    new = to_mapping(Train(data=Data(root="there"), workers=0, out="b", resume=True, device="cpu"))
    assert differences(old, new) == []
    assert differences(old, to_mapping(Train(optimiser=Optimiser(lr=1.0), epochs=3))) == ["optimiser.lr", "epochs"]
