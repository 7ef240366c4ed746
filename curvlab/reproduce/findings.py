"""The page of findings: claim by claim, what the paper says, what was measured, and whether it holds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from curvlab.report.content import Answer, Content, Section
from curvlab.report.tables import Entry, Table
from curvlab.report.theme import Look
from curvlab.report.words import listed
from curvlab.report.write import write_pages
from curvlab.reproduce.claims import claims
from curvlab.reproduce.experiment import Experiment
from curvlab.reproduce.experiments import experiments
from curvlab.reproduce.judgement import Claim, Frames, Judgement
from curvlab.reproduce.run import work_folder
from curvlab.reproduce.subjects import Options
from curvlab.studies.store import Store

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
    judged = [
        (experiment, _frames(experiment, output / name), claims().get(name, ()))
        for name, experiment in experiments().items()
    ]
    sections, counts = [], Counter[str]()
    for experiment, frames, found in judged:
        if not found:
            continue
        results = [claim.judge(frames) for claim in found]
        counts.update(result.verdict for result in results)
        sections.append(_section(experiment, frames, found, results))
    content = Content(
        title="The paper's claims, one by one",
        facts=(("scale", options.scale),),
        answer=_answer(counts),
        sections=tuple(sections),
        look=lambda theme: Look(theme=theme),
        names=(),
    )
    return write_pages(content, output, "findings")


def _frames(experiment: Experiment, folder: Path) -> Frames:
    work = work_folder(folder)
    if not (work / "results.jsonl").exists():
        return {}
    return experiment.frames(Store(work, read_only=True))


def _section(
    experiment: Experiment, frames: Frames, found: tuple[Claim, ...], results: list[Judgement]
) -> Section:
    rows = tuple(
        (Entry(claim.says), Entry(result.measured), Entry(result.verdict))
        for claim, result in zip(found, results, strict=True)
    )
    links = [("the page", f"{experiment.name}/report.html")] if frames else []
    links += [(f"{name}.csv", f"{experiment.name}/{name}.csv") for name in frames]
    rules = {claim.rule: [c.says for c in found if c.rule == claim.rule] for claim in found}
    return Section(
        experiment.name,
        experiment.title,
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


def _answer(counts: Counter[str]) -> Answer:
    total = sum(counts.values())
    parts = [f"{counts[verdict]} {words}" for verdict, words in VERDICTS.items() if counts[verdict]]
    return Answer(
        f"Of {total} claims, {listed(parts)}." if parts else "No claim has been judged.",
        (
            "Verdicts are computed from the frames by the rules under each table. The paper's optimizer "
            "behind the trajectories, its numbers of updates, the examples behind its expectations, its "
            "pre-processing and the settings behind its figures are not printed, so a claim that does not "
            "hold here may hold under settings that are not known.",
        ),
    )
