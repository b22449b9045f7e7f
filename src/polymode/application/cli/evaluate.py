"""``polymode evaluate``: the scores of a finished run."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from polymode.application.cli.corruptions import CorruptedImages, corruption_table, judge_run, summary_lines
from polymode.application.cli.options import AVERAGE, JudgingOptions, UsageError, option
from polymode.application.cli.output import console, posterior_table, print_json, reporter_of, say
from polymode.application.cli.runs import StoredRun, seeded
from polymode.application.comparison import judge, noise_floor_text
from polymode.judging.evaluation import evaluate
from polymode.judging.reference import Reference
from polymode.posteriors.base import Averaged
from polymode.storage import finite, write_text
from polymode.training.loop.arithmetic import with_threads

ABOUT = """Judge the posteriors of a run: on its own test data, or on a table or data set of yours.

With --corruptions: on corrupted test images, a row a corruption."""


@dataclass(frozen=True)
class EvaluateOptions(JudgingOptions):
    """Options of ``polymode evaluate``."""

    run: str = option("", "folder of the run", place="argument")
    data: str = option(
        "", "labelled data: a table or the name of a data set (default: the run's own test data)"
    )
    ood: str = option("", "data set outside the distribution")
    reference: str = option(
        "",
        "file of polymode reference, or FILE.npz:NAME with probabilities: adds distances to it",
    )
    corruptions: str = option(
        "", "judge on corrupted images: all (19), standard (15), or names with commas", metavar="NAMES"
    )
    severities: str = option("1,2,3,4,5", "severities of the corruptions, with commas")
    corruption_images: int = option(0, "corrupt only the first so many test images (default: all)")
    corruption_folder: str = option(
        "",
        "folder of corrupted images as CIFAR-10-C or ImageNet-C has them (default: CIFAR-10-C or CIFAR-100-C "
        "in the data folder if there, or else they are made)",
    )
    baseline: str = option("", "folder of another run: adds mCE and relative mCE against it")
    model: str = option(
        "", "the network of the run, where it is your own code: package.module:callable", metavar="MODEL"
    )
    trust: bool = option(
        False, "import whatever code the run's folder names: only for folders you trust", place="screen"
    )
    average: str = option("predictions", AVERAGE, choices=get_args(Averaged))
    out: str = option("", "also write all scores to this .json file")


def run(options: EvaluateOptions) -> None:
    """Judge every posterior of the run and print the mean scores."""
    if not options.run:
        raise UsageError("Name the folder of a run: polymode evaluate RUN.")
    if options.out and Path(options.out).suffix != ".json":
        raise UsageError(f"--out {options.out!r} must end in .json.")
    given = [options.data, options.ood]
    stored = StoredRun.open(options.run, options.model, given, trust=options.trust, own_data=not options.data)
    with with_threads(options.threads or stored.threads):
        if options.corruptions:
            _run_on_corruptions(options, stored)
        else:
            _run_on_test_data(options, stored)


def _run_on_test_data(options: EvaluateOptions, stored: StoredRun) -> None:
    """Judge every posterior on its own test data, or on other labelled ones."""
    for name in ("baseline", "corruption_folder", "corruption_images"):
        if getattr(options, name):
            raise UsageError(f"--{name.replace('_', '-')} needs --corruptions.")
    reporter = reporter_of(options)
    ood = None
    if options.ood:
        ood = stored.with_ood(stored.own_task, options.ood).ood
    elif not options.data or stored.is_own(options.data):
        ood = stored.own_ood
    reference = Reference.load(options.reference) if options.reference else None
    found, after, num_examples = [], [], 0
    for index in range(stored.num_posteriors):
        reporter.say(f"judging posterior {index + 1} of {stored.num_posteriors}")
        split = stored.split(options.data, index)
        num_examples += split.test.num_examples
        posterior = stored.posterior(index)
        judged = judge(
            posterior,
            split,
            ood,
            reference,
            num_draws=options.num_draws,
            bins=options.calibration,
            average=options.average,  # type: ignore[arg-type]  # one of its choices
        )
        found.append(judged.scores)
        if stored.is_calibrated:
            calibrated = stored.calibrated(posterior, index, options.num_draws)
            after.append(
                evaluate(
                    calibrated,
                    split.test,
                    num_draws=options.num_draws if posterior.num_members is None else None,
                    generator=seeded(0),
                    target_scale=split.preprocessing.target_scale,
                    bins=options.calibration,
                    average=options.average,  # type: ignore[arg-type]  # one of its choices
                )
            )
    reporter.close()
    told = {"calibrated": after} if after else {}
    if options.out:
        both = [scores | {"calibrated": each} for scores, each in zip(found, after, strict=bool(after))]
        write_text(Path(options.out).resolve(), json.dumps(both or found, indent=2) + "\n")
    if options.json:
        floor = {} if reference is None else {"noise_floor": reference.noise_floor}
        print_json({"run": options.run, "posteriors": found} | told | floor)
        return
    title = f"{stored.stated} on {options.data or 'its test data'}"
    title += f" ({num_examples // len(found)} examples)"
    console().print(posterior_table(title, stored.posterior(0).network.likelihood, found, after))
    if reference is not None:
        say(options, noise_floor_text(reference))
    if options.out:
        say(options, f"scores   {options.out}")


def _run_on_corruptions(options: EvaluateOptions, stored: StoredRun) -> None:
    """Judge every posterior on corrupted images and print the mean scores of each corruption."""
    if options.ood or options.reference:
        raise UsageError("--corruptions is a judgement of its own: leave --ood and --reference out.")
    images = CorruptedImages.wanted(
        options.corruptions, options.severities, options.corruption_images, options.corruption_folder
    )
    baseline = None
    if options.baseline:
        given = [options.data]
        baseline = StoredRun.open(options.baseline, options.model, given, trust=options.trust, baseline=True)
    reporter = reporter_of(options)
    judged = judge_run(
        stored, options.data, images, baseline, options.num_draws, options.calibration, reporter
    )
    reporter.close()
    documents = judged.documents()
    if options.out:
        write_text(Path(options.out).resolve(), json.dumps(finite(documents), indent=2) + "\n")
    if options.json:
        print_json({"run": options.run, "images": judged.source, "posteriors": documents})
        return
    title = f"{stored.stated} on {judged.num_images} corrupted images ({judged.source})"
    console().print(corruption_table(title, judged))
    for line in summary_lines(judged):
        say(options, line)
    if options.out:
        say(options, f"scores   {options.out}")
