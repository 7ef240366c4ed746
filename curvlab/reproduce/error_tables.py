"""Tables 2 to 5: layer-wise errors of the curvature matrices, averaged along training, beside the paper's.

The paper leaves open the optimizer behind the trajectory, the number of updates s, the examples behind E, the
pre-processing and the variant of Xavier's initialisation. Here: PCH-1 with EA-CG, and in tables of their own
PCH-1 with KFI, which leaves the plateau sooner (lr 0.2, α 0.01, batch 100); inputs standardised by channel,
Xavier uniform, zero biases; the updates, the stride along the trajectory and the measured batches are the
scale's, below.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from curvlab.report.content import Answer, Content, Drawing, Section
from curvlab.report.drawing import FONT, Look, dress, figure_of, log_axis, shorten
from curvlab.report.numbers import MISSING, digits, join_names, percent
from curvlab.report.tables import Entry, Table
from curvlab.reproduce.error_statistics import INNER, PHASES, ROUNDING, averages, share_of, with_phases
from curvlab.reproduce.error_trajectory import PROVIDERS, Sampling, Trajectory, errors_frame
from curvlab.reproduce.experiment import Experiment, ExperimentOutcome, ExperimentTask, rows_of
from curvlab.reproduce.paper import paper_errors
from curvlab.reproduce.subjects import Options, Role, Scale, subject, uninformed
from curvlab.studies.small.errors import TOTAL
from curvlab.studies.store import Store
from curvlab.studies.train.plan import TrainPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "EA_CG",
    "KFI",
    "ErrorTable",
    "Length",
    "average_table",
    "error_answer",
    "errors_by_layer",
    "errors_by_update",
    "share_table",
    "shares_frame",
]


def average_table(means: pd.DataFrame, printed: pd.DataFrame, column: str, caption: str) -> Table:
    """Layers down, providers across, each with the deviation over seeds and beside the paper's number."""
    providers = list(dict.fromkeys(means["provider"]))
    in_paper = set(printed["provider"])
    heads, numeric = ["layer"], [False]
    for provider in providers:
        heads += [provider, *(["the paper's"] if provider in in_paper else [])]
        numeric += [True] * (2 if provider in in_paper else 1)
    ours = means.set_index(["provider", "layer"])
    paper = printed.set_index(["provider", "layer"])["error"]
    rows = []
    for layer in dict.fromkeys(means["layer"]):
        if column == "relative" and layer == INNER:
            continue
        row = [Entry(str(layer), float(layer) if isinstance(layer, int) else None)]
        for provider in providers:
            value = ours.loc[(provider, layer)]
            row.append(_with_deviation(float(value[column]), float(value[f"{column}_deviation"])))
            if provider in in_paper:
                row.append(_entry_of_the_paper(paper, provider, layer))
        rows.append(tuple(row))
    return Table(caption, tuple(heads), tuple(numeric), tuple(rows), sortable=False)


def _with_deviation(mean: float, deviation: float) -> Entry:
    if mean < ROUNDING:
        return Entry("0", mean)
    spread = "" if pd.isna(deviation) else f" ± {digits(deviation, 2)}"
    return Entry(digits(mean) + spread, mean)


def _entry_of_the_paper(paper: pd.Series, provider: str, layer: object) -> Entry:
    if (provider, layer) not in paper.index:
        return Entry(MISSING)
    value = float(paper.loc[(provider, layer)])  # type: ignore[index]
    return Entry(f"{value:.4f}", value)


def share_table(shares: pd.DataFrame) -> Table:
    """One row for each measured batch, phase and ordering."""
    heads = ("ordering", "batch", "phase", "points", "holds in", "95 % interval", "seeds", "95 % interval")
    rows = tuple(
        (
            Entry(row.ordering),
            Entry(str(row.batch), float(row.batch)),
            Entry(row.phase),
            Entry(str(row.points), float(row.points)),
            Entry(percent(row.share), row.share),
            Entry(f"{percent(row.low)} to {percent(row.high)}", row.low),
            Entry(f"{row.seeds_holding} of {row.seeds}", row.seeds_holding / max(row.seeds, 1)),
            Entry(f"{percent(row.seeds_low)} to {percent(row.seeds_high)}", row.seeds_low),
        )
        for row in rows_of(shares)
    )
    return Table("Orderings", heads, (False, True, False, True, True, False, True, False), rows)


def error_answer(means: pd.DataFrame, printed: pd.DataFrame, shares: pd.DataFrame, batch: int) -> Answer:
    """The Totals beside the paper's, and how often its orderings hold."""
    totals = means[means["layer"] == TOTAL].set_index("provider")["error"]
    paper = printed[printed["layer"] == TOTAL].set_index("provider")["error"]
    ours = join_names([f"{name} {digits(float(totals[name]))}" for name in paper.index if name in totals])
    theirs = join_names([f"{name} {value:.4f}" for name, value in paper.items()])
    holds = [
        f"{row.ordering} in {percent(row.share)} of {row.points} points "
        f"({percent(row.low)} to {percent(row.high)}) and in {row.seeds_holding} of {row.seeds} seeds"
        for row in rows_of(shares[(shares["batch"] == batch) & (shares["phase"] == "all")])
    ]
    return Answer(
        f"Total errors: {ours}.",
        (
            f"The paper has {theirs}. Not all of its settings are known; agreement is not to be expected.",
            f"Its orderings, measured on {batch} examples: {'; '.join(holds)}.",
            *_depth(means),
        ),
    )


def _depth(means: pd.DataFrame) -> tuple[str, ...]:
    """Whether errors accumulate towards the input: relative ones at the last inner and the first layer."""
    layers = means[[isinstance(layer, int) for layer in means["layer"]]]
    last = max(layers["layer"]) - 1
    words = []
    for provider, group in layers.groupby("provider", sort=False):
        relative = group.set_index("layer")["relative"]
        words.append(f"{provider} {percent(float(relative[last]))} and {percent(float(relative[1]))}")
    return (f"Relative errors at layer {last} and at layer 1, next to the input: {'; '.join(words)}.",)


NAMES = {"error": "error", "relative": "relative error"}
PLATEAU = "loss, as a share of the uniform prediction's"


def errors_by_update(errors: pd.DataFrame, column: str, uninformed: float, look: Look) -> Axes:
    """The total error of each provider by update, one panel per seed; the grey line is the loss."""
    totals = errors[errors["layer"] == TOTAL]
    seeds = sorted(totals["seed"].unique())
    panels = _panels(len(seeds), 2.6)
    for axes, seed in zip(panels, seeds, strict=True):
        run = totals[totals["seed"] == seed]
        for provider, group in run.groupby("provider", sort=False):
            axes.plot(group["step"], group[column], **_style(look, str(provider)))
        if bool((run[column] > 0).all()):
            log_axis(axes, "y")
        loss = run.drop_duplicates("step")
        twin = axes.twinx()
        twin.plot(loss["step"], loss["loss"] / uninformed, color=look.theme.muted, alpha=0.5, linewidth=2.5)
        twin.set(ylim=(0, 1.15), yticks=[])
        twin.spines[:].set_visible(False)
        axes.set(xlabel="update", title=f"seed {seed}")
        axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
        _dress(axes, look)
    panels[0].set_ylabel(f"{NAMES[column]}, Total")
    return _with_legend(panels, look, list(totals["provider"].unique()), PLATEAU)


def errors_by_layer(ours: pd.DataFrame, printed: pd.DataFrame, look: Look) -> Axes:
    """Mean errors by layer: absolute ones with the paper's (hollow), and relative ones."""
    panels = _panels(2, 4.2)
    layers = ours[[isinstance(layer, int) for layer in ours["layer"]]]
    for axes, column in zip(panels, ("error", "relative"), strict=True):
        for provider, group in layers.groupby("provider", sort=False):
            # An exact block is not a point of a logarithmic curve.
            shown = group if column == "relative" else group[group["relative"] > ROUNDING]
            axes.plot(shown["layer"], shown[column], marker="o", **_style(look, str(provider)))
        axes.set(xlabel="layer", ylabel=f"mean {NAMES[column]}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    known = printed[[isinstance(layer, int) for layer in printed["layer"]]]
    for provider, group in known.groupby("provider", sort=False):
        positive = group[group["error"] > 0]
        style: dict[str, Any] = {
            "color": look.colour(str(provider)),
            "linestyle": (0, (1.2, 1.6)),
            "linewidth": 1.2,
        }
        panels[0].plot(positive["layer"], positive["error"], marker="o", markerfacecolor="none", **style)
    log_axis(panels[0], "y")
    panels[1].set_ylim(bottom=0)
    for axes in panels:
        _dress(axes, look)
    return _with_legend(panels, look, list(layers["provider"].unique()), "" if known.empty else "the paper")


def _panels(count: int, width: float) -> list[Axes]:
    """`count` panels in rows of at most three, on one figure."""
    columns = min(count, 3)
    rows = -(-count // columns)
    figure = Figure(figsize=(max(width * columns, 7.0), 2.9 * rows + 0.4), layout="constrained")
    made = figure.subplots(rows, columns, squeeze=False).ravel()
    for spare in made[count:]:
        spare.remove()
    return list(made[:count])


def _dress(axes: Axes, look: Look) -> None:
    dress(axes, look)
    figure_of(axes).set_facecolor(look.theme.paper)
    axes.title.set(color=look.theme.ink, fontsize=FONT)


def _style(look: Look, provider: str) -> dict[str, Any]:
    """The exact kinds are dashed: they are no rivals but what the recursions approximate."""
    exact = "[" in provider
    return {
        "color": look.colour(provider),
        "linewidth": 1.3,
        "linestyle": (0, (4, 2)) if exact else "-",
        "markersize": 3.5,
    }


def _with_legend(panels: list[Axes], look: Look, providers: list[str], extra: str) -> Axes:
    entries = [Line2D([], [], label=shorten(name), **_style(look, name)) for name in providers]
    if extra == PLATEAU:
        entries.append(Line2D([], [], color=look.theme.muted, alpha=0.5, linewidth=2.5, label=extra))
    elif extra:
        entries.append(
            Line2D(
                [],
                [],
                color=look.theme.ink,
                marker="o",
                markerfacecolor="none",
                linestyle=(0, (1.2, 1.6)),
                label=extra,
            )
        )
    figure = figure_of(panels[0])
    box = figure.legend(
        handles=entries,
        loc="outside lower left",
        ncols=3,
        frameon=False,
        fontsize=FONT,
        labelcolor=look.theme.ink,
    )
    for text in box.get_texts():
        text.set_parse_math(False)
    return panels[0]


EA_CG = "second-order[provider=pch-1,solver=ea-cg,lr=0.2,alpha=0.01]"
KFI = "second-order[provider=pch-1,solver=kfi,lr=0.2,alpha=0.01]"
EVALUATED = {"cifar10": 10_000, "imagenet10": 200}  # for the run's own rows, which the table does not use
LIMITS = {"cifar10": "", "imagenet10": "test=200"}


@dataclass(frozen=True)
class Length:
    """How far a scale goes: updates, what is measured along them, and the seeds."""

    updates: int
    samplings: tuple[Sampling, ...]
    seeds: tuple[int, ...]


LENGTHS: dict[tuple[Scale, Role], Length] = {  # along EA-CG
    ("smoke", "cifar10"): Length(60, (Sampling(100, 6), Sampling(1000, 20)), (0, 1)),
    ("smoke", "imagenet10"): Length(60, (Sampling(100, 6), Sampling(1000, 20)), (2, 3)),
    ("laptop", "cifar10"): Length(2000, (Sampling(100, 100), Sampling(1000, 500)), (0, 1, 2, 3, 4)),
    ("laptop", "imagenet10"): Length(200, (Sampling(100, 20), Sampling(1000, 100)), (0, 1)),
    ("paper", "cifar10"): Length(100_000, (Sampling(100, 500), Sampling(1000, 5000)), (0, 1, 2, 3, 4)),
    ("paper", "imagenet10"): Length(26_000, (Sampling(100, 130), Sampling(1000, 1300)), (0, 1, 2)),
}
KFI_LENGTHS: dict[tuple[Scale, Role], Length] = LENGTHS | {
    ("laptop", "cifar10"): Length(800, (Sampling(100, 50), Sampling(1000, 200)), (0, 1)),
}


@dataclass(frozen=True)
class ErrorTable(Experiment):
    """One of the tables: a network and a criterion.

    >>> table = ErrorTable("table2", "Table 2", "cifar10", "cross-entropy", (("pch-2", "pch-1"),))
    >>> [task.label for task in table.tasks(Options("smoke"))]
    ['seed 0', 'seed 1']
    """

    role: Role
    criterion: str
    orderings: tuple[tuple[str, ...], ...]
    optimizer: str = EA_CG
    printed: str = ""
    """The table of the paper that is set beside it; by default the one of the same name."""

    def length(self, scale: Scale) -> Length:
        """How far a scale goes along this trajectory."""
        return (LENGTHS if self.optimizer == EA_CG else KFI_LENGTHS)[scale, self.role]

    def tasks(self, options: Options) -> Sequence[ExperimentTask]:
        """One trajectory a seed."""
        length = self.length(options.scale)
        plans = [
            TrainPlan(
                subject(self.role, self.criterion, seed, options, LIMITS[self.role])[0],
                self.optimizer,
                evaluate_examples=EVALUATED[self.role],
            )
            for seed in options.seeds or length.seeds
        ]
        return [Trajectory(plan, length.updates, length.samplings, PROVIDERS) for plan in plans]

    def frames(self, store: Store) -> dict[str, pd.DataFrame]:
        """`errors`: every point; `averages`: the paper's averages; `orderings`: where they hold."""
        if not store.rows("errors"):
            return {}
        errors = with_phases(errors_frame(store), self.uninformed)
        return {
            "errors": errors,
            "averages": _averages(errors),
            "orderings": shares_frame(errors, self.orderings),
        }

    @property
    def uninformed(self) -> float:
        """The loss of the uniform prediction over ten classes: the height of the plateau."""
        return uninformed(self.criterion)

    def content(self, outcome: ExperimentOutcome) -> Content:
        """Averages beside the paper's, orderings with their intervals, and the trajectories."""
        frames, printed = outcome.frames, paper_errors(self.printed or self.name)
        length = self.length(outcome.options.scale)
        if not frames:
            return self.nothing(outcome)
        if outcome.options.scale == "smoke":  # another network: its layers are not the paper's
            printed = printed[printed["layer"] == TOTAL]
        errors = frames["errors"]
        smallest = min(errors["batch"])
        shown = errors[errors["batch"] == smallest]
        sections = [
            *self._average_sections(frames["averages"], printed),
            _ordering_section(frames["orderings"]),
            self._trajectory_section(shown),
            _settings_section(self, outcome, length),
            self.again(outcome),
        ]
        means = frames["averages"].query("batch == @smallest and phase == 'all'")
        return Content(
            title=self.title,
            facts=_facts(self, errors, smallest),
            answer=error_answer(means, printed, frames["orderings"], smallest),
            sections=tuple(sections),
            look=lambda theme: Look.of_frames(errors, theme=theme),
            names=tuple(errors["provider"].unique()),
        )

    def _average_sections(self, means: pd.DataFrame, printed: pd.DataFrame) -> list[Section]:
        sections = []
        for batch, of_batch in means[means["phase"] == "all"].groupby("batch"):
            drawing = Drawing(
                f"layers-{batch}",
                f"Mean errors by layer, measured on {batch} examples. Left: absolute, with the paper's "
                "(hollow, dotted). Right: relative to the norm of the exact block.",
                partial(errors_by_layer, of_batch, printed),
            )
            absolute = average_table(of_batch, printed, "error", f"Mean errors, {batch} examples measured")
            relative = average_table(
                of_batch, printed.iloc[:0], "relative", f"Mean relative errors, {batch} examples measured"
            )
            title = f"Errors by layer, measured on {batch} examples"
            sections.append(
                Section(f"layers-{batch}", title, drawings=(drawing,), tables=(absolute, relative))
            )
        return sections

    def _trajectory_section(self, shown: pd.DataFrame) -> Section:
        caption = (
            "Total {} by update, one panel per seed. The grey line is the loss on the measured examples, as "
            "a share of the uniform prediction's: 1 is the plateau."
        )
        drawings = tuple(
            Drawing(
                f"{column}-by-update",
                caption.format(name),
                partial(errors_by_update, shown, column, self.uninformed),
            )
            for column, name in (("error", "error"), ("relative", "relative error"))
        )
        return Section("trajectory", "Along the trajectory", drawings=drawings)


def _parts(errors: pd.DataFrame) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """The points of each measured batch: all of them, then those of each phase that has any."""
    for batch, of_batch in errors.groupby("batch"):
        for phase in ("all", *PHASES):
            chosen = of_batch if phase == "all" else of_batch[of_batch["phase"] == phase]
            if not chosen.empty:
                yield {"batch": batch, "phase": phase}, chosen


def _averages(errors: pd.DataFrame) -> pd.DataFrame:
    """The averages by measured batch and phase."""
    parts = []
    for names, chosen in _parts(errors):
        points = chosen[["seed", "step"]].drop_duplicates()
        parts.append(averages(chosen).assign(**names, points=len(points)))
    return pd.concat(parts, ignore_index=True)


def shares_frame(errors: pd.DataFrame, orderings: Sequence[Sequence[str]]) -> pd.DataFrame:
    """Where each ordering of the Totals holds, by measured batch and phase."""
    totals = errors[errors["layer"] == TOTAL]
    return pd.DataFrame(
        [
            names | vars(share_of(chosen, ordering))
            for names, chosen in _parts(totals)
            for ordering in orderings
        ]
    )


def _ordering_section(shares: pd.DataFrame) -> Section:
    text = (
        "In what share of the measured points each of the paper's orderings of the Totals holds. Points of "
        "one run are not independent: the interval (95 %) is a bootstrap over seeds and blocks of points. "
        "Seeds: how many have averages that obey the ordering, with Clopper and Pearson's interval."
    )
    return Section("orderings", "The paper's orderings", text, tables=(share_table(shares),))


def _settings_section(table: ErrorTable, outcome: ExperimentOutcome, length: Length) -> Section:
    _, note = subject(table.role, table.criterion, 0, outcome.options)
    measured = "; ".join(
        f"{s.batch} examples at every {s.stride}th update" if s.stride > 1 else f"{s.batch} at every update"
        for s in length.samplings
    )
    notes = (
        "Error: ‖B̃ − |B|‖_F of a layer's bias block, from the absolute Hessian |H|; relative: over ‖|B|‖_F.",
        f"Trajectory: `{table.optimizer}`, batch 100, {length.updates} updates from each seed.",
        f"Errors measured on {measured}; the examples are drawn from the training set by the seed, each "
        "class in proportion, and are the same along a run.",
        "Network as built from the seed: sigmoid, Xavier uniform, zero biases; standardised inputs.",
        "`fisher` is the empirical Fisher of the given labels, as in the paper; `fisher[kind=exact]` takes "
        "the expectation over the model's own labels, `gauss-newton[kind=exact]` has no expectation "
        "approximation (for cross-entropy the two are equal).",
        "plateau: until the loss first falls below 98 % of the uniform prediction's; escape: until 90 %; "
        "late: after.",
    )
    return Section("settings", "What was run", notes=(*((note,) if note else ()), *notes))


def _facts(table: ErrorTable, errors: pd.DataFrame, batch: int) -> tuple[tuple[str, str], ...]:
    seeds = sorted(errors["seed"].unique())
    points = errors[errors["batch"] == batch][["seed", "step"]].drop_duplicates()
    return (
        ("data", str(errors["data"].iloc[0])),
        ("criterion", table.criterion),
        ("seeds", ", ".join(str(seed) for seed in seeds)),
        ("points", str(len(points))),
        ("updates", str(int(errors["step"].max()))),
    )
