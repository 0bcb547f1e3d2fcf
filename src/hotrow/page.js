// Charts that answer to the pointer, tables that sort, and each chart's values as a table. draw.py says what it reads.
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const make = (name, text, parent) => {
    const node = document.createElement(name);
    node.textContent = text;
    parent.append(node);
    return node;
  };
  const tip = make("div", "", document.body);
  tip.id = "tip";
  tip.hidden = true;
  const show = (event, text) => {
    tip.textContent = text;
    tip.hidden = false;
    const left = event.pageX + 14, width = document.documentElement.clientWidth;
    tip.style.left = Math.max(4, Math.min(left, width - tip.offsetWidth - 4)) + "px";
    tip.style.top = event.pageY + 16 + "px";
  };
  const hide = () => { tip.hidden = true; };
  const shown = (value) => Number(value).toLocaleString("en-US", { maximumSignificantDigits: 6 });

  const axis = (text) => {
    const [scale, low, high, start, end, unit, ...label] = text.split(" ");
    const f = scale === "log" ? Math.log10 : (v) => v;
    const [a, b] = [f(+low), f(+high)];
    return {
      label: label.join(" "), unit: unit === "-" ? "" : " " + unit, start: +start, end: +end,
      at: (v) => +start + (end - start) * (f(scale === "log" ? Math.max(v, +low) : v) - a) / (b - a || 1),
    };
  };
  const titleOf = (node) => node.dataset.title || "";
  const linesOf = (svg) => [...svg.querySelectorAll("[data-points]")].map((node) => ({
    name: titleOf(node), colour: node.getAttribute("stroke") || node.getAttribute("fill"),
    points: node.dataset.points.split(" ").map((pair) => pair.split(",").map(Number)),
  })).reverse();  // drawn last to first

  // A title becomes data-title: the page shows it at once, and on touch, so the browser does not show it again.
  for (const title of document.querySelectorAll("svg title")) {
    title.parentNode.dataset.title = title.textContent;
    title.remove();
  }

  for (const svg of document.querySelectorAll("svg")) {
    const follow = svg.dataset.x ? lineTips(svg) : titleTips;
    svg.addEventListener("pointermove", follow);
    svg.addEventListener("pointerdown", follow);
    svg.addEventListener("pointerleave", () => { hide(); svg.querySelectorAll(".mark").forEach((node) => node.remove()); });
    addValues(svg);
  }

  function titleTips(event) {
    const text = titleOf(event.target);
    if (text) show(event, text); else hide();
  }

  function lineTips(svg) {
    const x = axis(svg.dataset.x), y = axis(svg.dataset.y);
    let lines;
    return (event) => {
      lines = lines || linesOf(svg);
      svg.querySelectorAll(".mark").forEach((node) => node.remove());
      const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
      const px = (event.clientX - box.left) * scale, py = (event.clientY - box.top) * scale;
      if (px < x.start - 6 || px > x.end + 6) return hide();
      const near = lines.map((line) => {
        const point = line.points.reduce((a, b) => (Math.abs(x.at(b[0]) - px) < Math.abs(x.at(a[0]) - px) ? b : a));
        const at = x.at(point[0]), aside = Math.abs(at - px);
        return { ...line, point, at, aside, far: Math.hypot(aside, y.at(point[1]) - py) };
      });
      // The point nearest in x, the other coloured lines' points at about that x, and a grey line that is pointed at.
      const least = (by) => near.reduce((a, b) => (b[by] < a[by] ? b : a));
      const closest = least("aside"), grey = least("far");
      const rows = near.filter((line) => line === closest || (line.colour !== "#bbb" && Math.abs(line.at - closest.at) < 8)
        || (line === grey && grey.far < 12));
      for (const line of rows) {
        const dot = document.createElementNS(SVG, "circle");
        const at = { class: "mark", cx: line.at, cy: y.at(line.point[1]), r: 4.5, fill: line.colour };
        Object.entries(at).forEach(([name, value]) => dot.setAttribute(name, value));
        svg.append(dot);
      }
      show(event, [`${x.label} ${shown(closest.point[0])}`,
        ...rows.map((line) => `${line.name}: ${shown(line.point[1])}${y.unit}`)].join("\n"));
    };
  }

  // The values of a chart, made when they are asked for.
  function addValues(svg) {
    const details = document.createElement("details");
    make("summary", "Values", details);
    (svg.closest("figure") || svg.parentNode).append(details);
    details.addEventListener("toggle", () => {
      if (!details.open || details.children.length > 1) return;
      const box = make("div", "", details);
      box.className = "values";
      const table = make("table", "", box), head = make("tr", "", make("thead", "", table)), body = make("tbody", "", table);
      const row = (cells) => {
        const tr = make("tr", "", body);
        cells.forEach((cell) => { make("td", cell, tr).className = /^[-\d]/.test(cell) ? "n" : ""; });
      };
      if (svg.dataset.x) {
        const x = axis(svg.dataset.x), y = axis(svg.dataset.y);
        [x.label, "line", y.label + y.unit].forEach((name) => make("th", name, head));
        linesOf(svg).forEach((line) => line.points.forEach((point) => row([shown(point[0]), line.name, shown(point[1])])));
      } else {
        ["what", "value"].forEach((name) => make("th", name, head));
        svg.querySelectorAll("[data-title]:not(text)").forEach((node) => {
          const [, what, value] = /^(.*?)(?:: ([^:]*))?$/s.exec(titleOf(node));
          row([what, value || ""]);
        });
      }
      sortable(table);
    });
  }

  function sortable(table) {
    const body = table.tBodies[0], first = body && body.rows[0];
    if (first && !table.tHead && [...first.cells].every((cell) => cell.tagName === "TH")) table.createTHead().append(first);
    const heads = [...(table.tHead ? table.tHead.rows[0].cells : [])];
    if (!body || body.rows.length < 2) return;
    const units = { KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30 };
    const value = (row, i) => {
      const cell = row.cells[i], text = cell ? cell.dataset.v || cell.textContent.trim() : "";
      const plain = parseFloat(text.replace(/,/g, ""));
      return text === "" ? -Infinity : Number.isNaN(plain) ? text.toLowerCase() : plain * (units[text.split(" ")[1]] || 1);
    };
    heads.forEach((head, i) => {
      const button = document.createElement("button");
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") === "descending" ? 1 : -1;
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", up > 0 ? "ascending" : "descending");
        const rows = [...body.rows].map((row) => [value(row, i), row]);
        rows.sort(([a], [b]) => up * (typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1));
        body.append(...rows.map(([, row]) => row));
      });
    });
  }
  document.querySelectorAll("table").forEach(sortable);
  addEventListener("beforeprint", () => document.querySelectorAll("details.run").forEach((run) => { run.open = true; }));
})();
