for (const table of document.querySelectorAll("table.sortable"))
  table.querySelectorAll("thead th").forEach((head, column) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      table.querySelectorAll("th[aria-sort]").forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const text = row => row.cells[column].textContent, number = row => parseFloat(text(row));
      const rows = [...table.tBodies[0].rows];
      const numeric = column > 0 && rows.some(row => !isNaN(number(row)));
      rows.sort((a, b) => {
        if (!numeric) return (down ? -1 : 1) * text(a).localeCompare(text(b));
        const [x, y] = [number(a), number(b)];
        if (isNaN(x) || isNaN(y)) return isNaN(x) - isNaN(y);
        return down ? y - x : x - y;
      });
      table.tBodies[0].append(...rows);
    });
  });
