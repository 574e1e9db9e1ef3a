from math import inf
from pathlib import Path

import pytest

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.regression.config import Thresholds, parse_shard, read_config


def written(folder: Path, text: str, *models: str) -> Path:
    for name in models:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    file = folder / "ncnn-check.toml"
    file.write_text(text)
    return file


def test_keys_of_a_model_override_those_of_the_file(tmp_path: Path) -> None:
    text = """
        models = ["a/*.onnx", "b.onnx"]
        baseline = "kept"
        convert = "conv '{onnx}' out={out}.ncnn.param"
        seeds = [0, 1]
        modes = ["fp32", "fp16"]
        thresholds = { accuracy = 1e-4, layers = 1.5, latency = inf }

        [model."a/one"]
        net = "nets/{stem}.param"
        shapes = { x = [1, 3, "H", 8] }
        values = { sr = 16000, on = true }
        blob_names = "pnnx"
        inputs = "one.npz"
        timeout = 5
        thresholds = { accuracy = { fp16 = 1e-2 }, layers = 2 }
    """
    config = read_config(written(tmp_path, text, "a/one.onnx", "a/two.onnx", "b.onnx"))
    assert config.baseline == tmp_path / "kept"
    assert [model.name for model in config.models] == ["a/one", "a/two", "b"]
    one, two, _ = config.models
    assert one.path == tmp_path / "a" / "one.onnx"
    assert one.net == tmp_path / "nets" / "one.param"
    assert one.inputs == (tmp_path / "one.npz",)
    bound = ["--value", "sr=16000", "--value", "on=true", "--shape", "x:1,3,H,8"]
    assert one.options.arguments == [*bound, "--blob-names", "pnnx"]
    assert (one.timeout, two.timeout) == (5, 300)
    assert one.thresholds == Thresholds({"fp16": 1e-2}, layers=2, latency=inf)
    assert two.thresholds == Thresholds({"fp32": 1e-4}, layers=1.5, latency=inf)
    assert two.convert == ("conv", "{onnx}", "out={out}.ncnn.param")
    assert (two.net, two.seeds, two.modes) == (None, (0, 1), ("fp32", "fp16"))


def test_parts_and_other_devices(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, 'models = ["**/*.onnx"]', "a.onnx", "b/c.onnx", "b/d.onnx"))
    parts = [config.chosen(shard=parse_shard(f"{i}/2")).models for i in (1, 2)]
    assert [[model.name for model in part] for part in parts] == [["a", "b/d"], ["b/c"]]
    assert [model.name for model in config.chosen(["b/*", "a"]).models] == ["a", "b/c", "b/d"]
    moved = config.everywhere(on="vulkan", modes=["fp16"]).models[0]
    assert (moved.on, moved.modes) == ("vulkan", ("fp16",))
    assert config.everywhere().models == config.models
    with pytest.raises(UsageError, match="no model is called 'x'; there are a, b/c, b/d"):
        config.chosen(["x"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models = [", "not TOML"),
        ("", "models is missing"),
        ("models = 'a.onnx'", "models has to be a list of paths or patterns"),
        ("models = []", "models has to be a list of paths or patterns"),
        ("models = ['*.pt']", "no file fits the pattern '\\*.pt'"),
        ("model = ['a.onnx']", "model has to be a table"),
        ("models = ['a.onnx']\nseed = [1]", "there is no key 'seed'; did you mean 'seeds'\\?"),
        ("models = ['a.onnx']\nseeds = [-1]", "seeds has to be a list of whole numbers"),
        ("models = ['a.onnx']\nmodes = ['int8']", "there is no mode 'int8'"),
        ("models = ['a.onnx']\ntimeout = 0", "timeout has to be a number of seconds"),
        ("models = ['a.onnx']\nconvert = 'x {onnx} {output}'", "model.a.convert: '{output}' has a placeholder"),
        ("models = ['a.onnx']\nconvert = 'x {onnx!r}'", "model.a.convert: '{onnx!r}' has a placeholder"),
        ("models = ['a.onnx']\nconvert = 'x \"{onnx}'", "model.a.convert is not a command: No closing quotation"),
        ("models = ['a.onnx']\nnet = '{onnx}.param'", "model.a.net: '{onnx}.param' has a placeholder"),
        ("models = ['a.onnx']\nthresholds = { speed = 1 }", "there is no key 'thresholds.speed'"),
        ("models = ['a.onnx']\nthresholds = { size = nan }", "thresholds.size has to be a factor"),
        ("models = ['a.onnx']\nthresholds = { size = true }", "thresholds.size has to be a factor"),
        ("models = ['a.onnx']\nthresholds = { accuracy = { int8 = 1 } }", "thresholds.accuracy has to be a number"),
        ("models = ['a.onnx']\n[model.b]", "there is no model 'b'; there are a"),
        ("models = ['a.onnx']\n[model.a]\nmodels = []", "there is no key 'model.a.models'"),
        ("models = ['a.onnx', 'a.pt2']", "would have one name; rename one"),
        ("models = ['a.onnx']\nshapes = { x = 3 }", "shapes has to be a table of lists of sizes"),
    ],
)
def test_invalid_keys_are_named(tmp_path: Path, text: str, message: str) -> None:
    file = written(tmp_path, text, "a.onnx")
    with pytest.raises(UsageError, match=f"ncnn-check.toml: .*{message}|{message}"):
        read_config(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none.toml: cannot be read: No such file.*docs/ci.md"):
        read_config(tmp_path / "none.toml")


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/2/3", "-1/2", ""])
def test_invalid_shards(text: str) -> None:
    with pytest.raises(UsageError, match="a shard is i/n"):
        parse_shard(text)
