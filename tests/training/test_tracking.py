import pytest
import torch

import polymode as pm
from polymode.training.keeping.tracking import TensorBoard


def test_tensorboard_files_hold_losses_scores_and_rates_across_a_resume(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    data = pm.ArrayData(x, (x[:, 0] > 0).long(), batch_size=20)
    seen, board = [], TensorBoard(tmp_path / "board")

    def watch(epoch):
        board(epoch)
        seen.append(epoch)
        if epoch.epochs_done == 2 and len(seen) == 2:
            raise RuntimeError("cut")

    def fit(**options):
        return pm.fit(
            pm.methods.DeepEnsemble(2),
            lambda: pm.models.MLP(2, 2, (4,)),
            data,
            likelihood="categorical",
            epochs=3,
            validation=data,
            observer=watch,
            progress=False,
            run_dir=tmp_path / "run",
            **options,
        )

    with pytest.raises(RuntimeError, match="cut"):
        fit()
    fit(resume=True)
    events = event_accumulator.EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    losses = events.Scalars("loss/mean")
    assert [event.step for event in losses] == [1, 2, 3]
    assert [event.value for event in losses] == pytest.approx([e.losses.mean().item() for e in seen])
    assert events.Scalars("validation_nll/0-1-0")[2].value == pytest.approx(
        seen[2].validation["nll"][1].item()
    )
    assert events.Scalars("learning_rate/all")[0].value == pytest.approx(1e-3)
