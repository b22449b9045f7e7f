"""Texts from training to scores."""

import json

import numpy as np
import pytest
from command_line import polymode, the_line

SMALL = ["--data", "a.txt", "--set", "data.length=20", "--set", "model.hidden=8", "--set", "model.width=6"]


def test_a_text_is_learned_and_another_one_judged(tmp_path):
    words = np.array(["the ", "cat ", "sat\n", "on ", "a ", "mat. "])
    for name, count in (("a", 900), ("b", 90)):
        drawn = np.random.default_rng(count).choice(words, count)
        (tmp_path / f"{name}.txt").write_text("".join(drawn))
    (tmp_path / "c.txt").write_text("zebra " * 50)
    run = ["--method", "single", "--epochs", 20, "--run", "one", "--set", "single.optimizer.lr=0.02"]
    trained = polymode("train", *SMALL, *run, cwd=tmp_path)
    assert r"12 classes ('\n', ' ', ., a," in trained.stderr + trained.stdout
    assert "BPC" in trained.stdout
    scores = json.loads(polymode("evaluate", "one", "--data", "b.txt", "--json", cwd=tmp_path).stdout)
    [scores] = scores["posteriors"]
    assert 0 < scores["bits_per_character"] < np.log2(12)
    assert scores["bits_per_character"] == pytest.approx(scores["nll"] / np.log(2))
    refused = polymode("evaluate", "one", "--data", "c.txt", "--quiet", cwd=tmp_path, code=1)
    assert "c.txt holds 'z' (place 0), which is none of the 12 characters" in the_line(refused)
    polymode("predict", "one", "b.txt", "--out", "p.npz", cwd=tmp_path)
    with np.load(tmp_path / "p.npz") as predicted:
        num_sequences = (len((tmp_path / "b.txt").read_text()) - 1) // 20
        assert predicted["sequence"].tolist() == np.repeat(range(num_sequences), 20).tolist()
        assert predicted["place"].tolist() == list(range(20)) * num_sequences
        assert set(predicted["label"]) <= set("".join(words))
        assert (predicted["p_a"] <= predicted["confidence"]).all()
