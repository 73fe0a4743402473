"use strict";
// The operations of both programs: searchable lists, folded by module, with the break in focus. Text is only ever set as text.
(() => {
  function make(tag, kind, text) {
    const element = document.createElement(tag);
    if (kind) element.className = kind;
    if (text !== undefined) element.textContent = text;
    return element;
  }
  const wordsOf = (box) => box.value.toLowerCase().split(/\s+/).filter(Boolean);

  // Findings and relations that have the words of a box.
  const finder = document.getElementById("find");
  if (finder) finder.addEventListener("input", () => {
    const words = wordsOf(finder);
    for (const each of document.querySelectorAll(".found")) {
      const text = each.textContent.toLowerCase();
      each.hidden = !words.every((word) => text.includes(word));
    }
  });

  const holder = document.getElementById("data");
  if (!holder) return;
  const programs = JSON.parse(holder.textContent);
  const states = ["related", "unrelated", "undescribed", "unknown"];
  const most = 300; // rows that are drawn at a time
  const longest = 8; // groups and operations that are repeated together
  const search = document.getElementById("search");
  const lost = document.getElementById("lost");
  const sent = document.getElementById("sent");
  const [NUMBER, TEXT, WHERE, BACKWARD, STATE, RELATION, MODULE, KIND] = [0, 1, 2, 3, 4, 5, 6, 7];

  // ------------------------------------------------------------------ modules
  // `layers.0.mlp.down` has the parts `layers.0`, `mlp`, `down`: a list of modules is no module.
  function partsOf(path) {
    const parts = [];
    for (const name of path ? path.split(".") : []) {
      if (/^\d+$/.test(name) && parts.length && !/\d$/.test(parts[parts.length - 1])) parts[parts.length - 1] += `.${name}`;
      else parts.push(name);
    }
    return parts;
  }
  // Operations from `low` to `high`, as groups of those that one module runs in a row, and single ones.
  class Group {
    constructor(program, low, high, depth, path, copies) {
      Object.assign(this, { program, low, high, depth, path, copies, open: false });
      const seen = new Set();
      for (let place = low; place < high; place++) seen.add(program.operations[place][STATE]);
      this.state = seen.has(1) ? 1 : seen.has(2) ? 2 : seen.has(0) ? 0 : 3;
      this.backward = high > low && program.operations[low][BACKWARD];
    }
    get children() {
      if (!this.known) this.known = this.copies || folded(this.program, members(this.program, this.low, this.high, this.depth));
      return this.known;
    }
    token() {
      const kinds = [];
      for (let place = this.low; place < this.high; place++) kinds.push(this.program.operations[place][KIND]);
      return `${this.path.replace(/\d+/g, "*")}:${kinds.join()}`;
    }
  }
  function members(program, low, high, depth) {
    const found = [];
    const parts = (place) => program.parts[program.operations[place][MODULE]];
    for (let place = low; place < high; ) {
      const key = parts(place)[depth];
      let end = place + 1;
      if (key !== undefined) {
        const backward = program.operations[place][BACKWARD];
        while (end < high && parts(end)[depth] === key && program.operations[end][BACKWARD] === backward) end++;
      }
      if (end - place > 1) {
        let inner = depth + 1; // a module that does nothing but call another is no row of its own
        const shares = (n) => parts(n)[inner] !== undefined && parts(n)[inner] === parts(place)[inner];
        for (let all = true; all; ) {
          for (let n = place; n < end && all; n++) all = shares(n);
          if (all) inner++;
        }
        found.push(new Group(program, place, end, inner, parts(place).slice(0, inner).join(".")));
      } else {
        if (key !== undefined) program.lonely.add(place); // no group says its module
        found.push(place);
      }
      place = end;
    }
    return found;
  }
  // Equal layers are one: a run of groups, and what stands between them, that is repeated.
  function folded(program, nodes) {
    const tokens = nodes.map((node) => (node instanceof Group ? node.token() : String(program.operations[node][KIND])));
    const found = [];
    for (let place = 0; place < nodes.length; ) {
      let best = 0, times = 1;
      for (let length = 1; length <= longest && place + 2 * length <= nodes.length; length++) {
        if (!nodes.slice(place, place + length).some((node) => node instanceof Group)) continue;
        let count = 1;
        while (tokens.slice(place, place + length).every((token, n) => token === tokens[place + count * length + n])) count++;
        if (count > 1 && count * length > best * times) [best, times] = [length, count];
      }
      if (!best) {
        found.push(nodes[place++]);
        continue;
      }
      const copies = nodes.slice(place, place + best * times);
      const low = (node) => (node instanceof Group ? node.low : node);
      const high = (node) => (node instanceof Group ? node.high : node + 1);
      const names = copies.filter((node) => node instanceof Group);
      const many = new Group(program, low(copies[0]), high(copies[copies.length - 1]), names[0].depth, "", copies);
      many.path = `${names[0].path} … ${names[names.length - 1].path}`;
      many.times = times;
      found.push(many);
      place += best * times;
    }
    return found;
  }

  // ------------------------------------------------------------------ panes
  class Pane {
    constructor(element, program) {
      this.element = element;
      this.rows = element.querySelector(".rows");
      this.count = element.querySelector(".count");
      this.show(program);
    }
    show(program) {
      this.program = program;
      if (!program.parts) {
        program.parts = program.modules.map(partsOf);
        program.lonely = new Set();
        program.nodes = folded(program, members(program, 0, program.operations.length, 0));
      }
      const place = this.place(program.focus);
      if (program.focus !== null) this.reveal(place);
      this.look(place);
    }
    place(number) {
      return number === null ? 0 : this.program.operations.findIndex((operation) => operation[NUMBER] === number);
    }
    // Opens all that an operation is in.
    reveal(place) {
      for (let nodes = this.program.nodes; nodes; ) {
        const inside = nodes.find((node) => node instanceof Group && node.low <= place && place < node.high);
        if (inside) inside.open = true;
        nodes = inside && inside.children;
      }
    }
    look(place) {
      const rows = this.unfolded();
      this.first = Math.max(0, rows.findIndex(([node]) => node === place) - 20);
      this.draw();
    }
    unfolded() {
      const rows = [];
      const add = (nodes, depth) => {
        for (const node of nodes) {
          rows.push([node, depth]);
          if (node instanceof Group && node.open) add(node.children, depth + 1);
        }
      };
      add(this.program.nodes, 0);
      return rows;
    }
    matches() {
      const words = wordsOf(search);
      if (!words.length && !lost.checked && !sent.checked) return null;
      const found = [];
      this.program.operations.forEach((o, place) => {
        if (lost.checked && o[STATE] !== 1 && o[STATE] !== 2) return;
        if (sent.checked && !o[TEXT].includes("dist.")) return;
        const text = `${o[TEXT]} ${o[WHERE]} ${o[RELATION]} ${this.program.modules[o[MODULE]]}`.toLowerCase();
        if (words.every((word) => text.includes(word))) found.push([place, 0]);
      });
      return found;
    }
    draw() {
      const matched = this.matches();
      const all = this.program.operations.length;
      const found = matched || this.unfolded();
      const first = matched ? 0 : Math.min(this.first, Math.max(0, found.length - 1));
      const last = Math.min(found.length, first + most);
      this.count.textContent = matched ? `${found.length} of ${all} operations` : `${all} operations`;
      const rows = found.slice(first, last).map(([node, depth]) =>
        node instanceof Group ? this.group(node, depth) : this.row(node, depth, Boolean(matched)));
      if (first > 0) rows.unshift(this.button(`${first} before`, () => { this.first = Math.max(0, first - most); this.draw(); }));
      if (last < found.length) {
        const rest = found.length - last;
        rows.push(matched ? this.line(`and ${rest} more; narrow the search`) : this.button(`${rest} after`, () => { this.first = last; this.draw(); }));
      }
      if (!found.length) rows.push(this.line("nothing matches"));
      this.rows.replaceChildren(...rows);
      const focus = this.rows.querySelector(".focus");
      this.rows.scrollTop = focus ? focus.offsetTop - this.rows.offsetTop - this.rows.clientHeight / 3 : 0;
    }
    group(node, depth) {
      const row = make("div", `operation group ${states[node.state]}`);
      row.style.paddingLeft = `${10 + 16 * depth}px`;
      const what = make("div", "what");
      const name = make("span", "name");
      name.append(make("span", "arrow", node.open ? "▾" : "▸"), make("code", "", node.path));
      if (node.times) name.append(make("b", "times", `×${node.times}`));
      what.append(name, make("span", "where", `${node.high - node.low} operations${node.backward ? ", backward" : ""}`));
      row.append(what);
      row.tabIndex = 0;
      row.setAttribute("role", "button");
      row.setAttribute("aria-expanded", String(node.open));
      const toggle = () => {
        const at = this.rows.scrollTop;
        node.open = !node.open;
        this.draw();
        this.rows.scrollTop = at;
      };
      row.addEventListener("click", toggle);
      row.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        toggle();
      });
      return row;
    }
    row(place, depth, matched) {
      const operation = this.program.operations[place];
      const row = make("div", `operation ${states[operation[STATE]]}`);
      if (depth) row.style.paddingLeft = `${10 + 16 * depth}px`;
      row.dataset.number = operation[NUMBER];
      const what = make("div", "what");
      const module = matched || this.program.lonely.has(place) ? this.program.modules[operation[MODULE]] : "";
      const where = module ? `${module} (${operation[WHERE]})` : operation[WHERE];
      what.append(make("code", "", operation[TEXT]), make("span", "where", where + (operation[BACKWARD] ? " backward" : "")));
      row.append(what);
      if (operation[RELATION]) row.append(make("div", "relation", operation[RELATION]));
      if (operation[NUMBER] === this.program.focus) {
        row.classList.add("focus");
        row.id = `break-${this.element.id}`;
      }
      const partner = /sequential (%\d+)/.exec(operation[RELATION]);
      if (partner) row.addEventListener("click", () => panes[0].point(partner[1]));
      return row;
    }
    point(value) {
      const place = this.program.operations.findIndex((operation) => operation[TEXT].startsWith(`${value}:`));
      if (place < 0) return;
      clear();
      this.reveal(place);
      this.look(place);
      const row = this.rows.querySelector(`[data-number="${this.program.operations[place][NUMBER]}"]`);
      row.classList.add("partner");
      this.rows.scrollTop = row.offsetTop - this.rows.offsetTop - this.rows.clientHeight / 3;
    }
    button(text, action) {
      const button = make("button", "", text);
      button.addEventListener("click", action);
      return button;
    }
    line(text) {
      return make("div", "operation soft", text);
    }
  }
  function clear() {
    search.value = "";
    lost.checked = false;
    sent.checked = false;
  }

  const ranks = programs.slice(1);
  const shown = Math.max(0, ranks.findIndex((program) => program.focus !== null));
  const panes = [new Pane(document.getElementById("sequential"), programs[0])];
  if (ranks.length) panes.push(new Pane(document.getElementById("distributed"), ranks[shown]));
  const choice = document.getElementById("program");
  ranks.forEach((program, number) => choice.append(new Option(program.name, number, false, number === shown)));
  choice.addEventListener("change", () => panes[1].show(ranks[choice.value]));
  const redraw = () => panes.forEach((pane) => pane.draw());
  search.addEventListener("input", redraw);
  lost.addEventListener("change", redraw);
  sent.addEventListener("change", redraw);
  const button = document.getElementById("to-break");
  if (button) button.addEventListener("click", () => {
    clear();
    panes.forEach((pane) => pane.show(pane.program));
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !["INPUT", "SELECT"].includes(document.activeElement.tagName)) {
      event.preventDefault();
      search.focus();
    }
  });
  // A link to #search=words opens with the words searched, so that a place can be sent to a colleague.
  const wanted = /^#search=(.+)/.exec(location.hash);
  if (wanted) {
    search.value = decodeURIComponent(wanted[1]);
    redraw();
  }
})();
