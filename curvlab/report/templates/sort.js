"use strict";
// Sort a table by the column whose head is clicked: numbers by value, text by name, unknown values last.
// The second column of a wide table sticks beside the first, whose width only the browser knows.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  table.style.setProperty("--first", `${heads[0].offsetWidth}px`);
  const key = (row, column) => {
    const cell = row.cells[column];
    return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent.trim();
  };
  const unknown = (value) => value === "–" || Number.isNaN(value);
  const compare = (a, b) => {
    if (typeof a === "number" && typeof b === "number") return a - b;
    if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
    return a.localeCompare(b, undefined, { numeric: true });
  };
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      const rows = [...body.rows].sort((first, second) => {
        const a = key(first, column);
        const b = key(second, column);
        return unknown(a) - unknown(b) || (unknown(a) ? 0 : sign * compare(a, b));
      });
      body.append(...rows);
    });
  });
}
