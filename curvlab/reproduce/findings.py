"""The page of findings: claim by claim, what the paper says, what was measured, and whether it holds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from curvlab.report.content import Answer, Content, Section
from curvlab.report.drawing import Look
from curvlab.report.numbers import join_names
from curvlab.report.pages import write_pages
from curvlab.report.tables import Entry, Table
from curvlab.reproduce.experiment import Claim, Experiment, Frames, Judgement
from curvlab.reproduce.experiments import claims, experiments
from curvlab.reproduce.provenance import BANNER, Provenance
from curvlab.reproduce.run import work_folder
from curvlab.reproduce.subjects import Options
from curvlab.studies.store import Store, edited_rows_refused

__all__ = ["write_findings"]

VERDICTS = {
    "holds": "hold",
    "mixed": "are mixed",
    "does not hold": "do not hold",
    "not measured": "are not measured",
}
HEADS = ("the paper says", "measured", "verdict")


def write_findings(output: str | Path, options: Options) -> Path:
    """Judge every claim by what is in the experiments' folders, and write findings.html and findings.md."""
    output = Path(output)
    known = claims()
    sections, counts, measured = [], Counter[str](), []
    for name, experiment in experiments().items():
        if not known.get(name):
            continue
        frames, provenance = _load_frames(experiment, output / name, options)
        results = [claim.judge(frames) for claim in known[name]]
        counts.update(result.verdict for result in results)
        sections.append(_section(experiment, frames, provenance, known[name], results))
        measured += [provenance] if frames else []
    scales = dict.fromkeys(scale for provenance in measured for scale in provenance.scales)
    content = Content(
        title="The paper's claims, one by one",
        facts=(("scale", ", ".join(scales or [options.scale])),),
        answer=_answer(counts, smoke=any(provenance.smoke for provenance in measured)),
        sections=tuple(sections),
        look=lambda theme: Look(theme=theme),
        names=(),
    )
    return write_pages(content, output, "findings")


def _load_frames(experiment: Experiment, folder: Path, options: Options) -> tuple[Frames, Provenance]:
    """The frames of an experiment, none where it has not run, and what they were measured on."""
    work = work_folder(folder)
    if not (work / "results.jsonl").exists():
        return {}, Provenance((options.scale,))
    store = Store(work, read_only=True)
    with edited_rows_refused(store):
        frames = experiment.frames(store)
        return frames, Provenance.of(store, frames, options)


def _section(
    experiment: Experiment,
    frames: Frames,
    provenance: Provenance,
    found: tuple[Claim, ...],
    results: list[Judgement],
) -> Section:
    trial = bool(frames) and provenance.smoke
    rows = tuple(
        (Entry(claim.says), Entry(result.measured), Entry(_verdict(result, trial)))
        for claim, result in zip(found, results, strict=True)
    )
    links = [("the page", f"{experiment.name}/report.html")] if frames else []
    links += [(f"{name}.csv", f"{experiment.name}/{name}.csv") for name in frames]
    rules = {claim.rule: [c.says for c in found if c.rule == claim.rule] for claim in found}
    return Section(
        experiment.name,
        f"{experiment.title} (here {provenance.words})" if trial else experiment.title,
        _where(frames, provenance),
        tables=(Table("Claims", HEADS, (False, False, False), rows, sortable=False),),
        folded=(
            Table(
                "How a verdict is reached",
                ("claims", "rule"),
                (False, False),
                tuple((Entry(" ".join(says)), Entry(rule)) for rule, says in rules.items()),
                sortable=False,
            ),
        ),
        links=tuple(links),
    )


def _verdict(result: Judgement, trial: bool) -> str:
    return f"{result.verdict} (no evidence)" if trial and result.verdict != "not measured" else result.verdict


def _where(frames: Frames, provenance: Provenance) -> str:
    """What stands under a heading: the data, the scale, and the states of the source if there are several."""
    if not frames:
        return "Not measured."
    no_evidence = " The paper's data were not used: no evidence." if provenance.smoke else ""
    mixed = f" {provenance.mixed}" if provenance.mixed else ""
    return f"Measured {provenance.words}.{no_evidence}{mixed}"


def _answer(counts: Counter[str], smoke: bool) -> Answer:
    total = sum(counts.values())
    parts = [f"{counts[verdict]} {words}" for verdict, words in VERDICTS.items() if counts[verdict]]
    judged = f"of {total} claims, {join_names(parts)}." if parts else "no claim has been judged."
    return Answer(
        f"No evidence, only a trial at smoke scale: {judged}" if smoke else judged[0].upper() + judged[1:],
        (
            *([BANNER] if smoke else []),
            "Verdicts are computed from the frames by the rules under each table. The paper's optimizer "
            "behind the trajectories, its numbers of updates, the examples behind its expectations, its "
            "pre-processing and the settings behind its figures are not printed, so a claim that does not "
            "hold here may hold under settings that are not known.",
        ),
    )
