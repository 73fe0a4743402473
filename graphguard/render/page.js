"use strict";
// The operations of both programs: searchable lists, with the break in focus. Text is only ever set as text.
(() => {
  const holder = document.getElementById("data");
  if (!holder) return;
  const programs = JSON.parse(holder.textContent);
  const states = ["related", "unrelated", "undescribed", "unknown"];
  const most = 300;
  const search = document.getElementById("search");
  const lost = document.getElementById("lost");

  class Pane {
    constructor(element, program) {
      this.element = element;
      this.rows = element.querySelector(".rows");
      this.count = element.querySelector(".count");
      this.show(program);
    }
    show(program) {
      this.program = program;
      this.first = Math.max(0, this.place(program.focus) - 20);
      this.draw();
    }
    place(number) {
      return number === null ? 0 : this.program.operations.findIndex((operation) => operation[0] === number);
    }
    matches() {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      return this.program.operations.filter(
        (o) => (!lost.checked || o[4] === 1 || o[4] === 2) && words.every((w) => `${o[1]} ${o[2]} ${o[5]}`.toLowerCase().includes(w))
      );
    }
    draw() {
      const found = this.matches();
      const whole = found.length === this.program.operations.length;
      const first = whole ? Math.min(this.first, Math.max(0, found.length - 1)) : 0;
      const last = Math.min(found.length, first + most);
      this.count.textContent = whole ? `${found.length} operations` : `${found.length} of ${this.program.operations.length} operations`;
      const rows = found.slice(first, last).map((operation) => this.row(operation));
      if (first > 0) rows.unshift(this.button(`${first} before`, () => { this.first = Math.max(0, first - most); this.draw(); }));
      if (last < found.length) {
        const rest = found.length - last;
        rows.push(whole ? this.button(`${rest} after`, () => { this.first = last; this.draw(); }) : this.line(`and ${rest} more; narrow the search`));
      }
      if (!found.length) rows.push(this.line("nothing matches"));
      this.rows.replaceChildren(...rows);
      const focus = this.rows.querySelector(".focus");
      this.rows.scrollTop = focus ? focus.offsetTop - this.rows.offsetTop - this.rows.clientHeight / 3 : 0;
    }
    row([number, text, where, backward, state, relation]) {
      const row = make("div", `operation ${states[state]}`);
      row.dataset.number = number;
      const what = make("div", "what");
      what.append(make("code", "", text), make("span", "where", where + (backward ? " backward" : "")));
      row.append(what);
      if (relation) row.append(make("div", "relation", relation));
      if (number === this.program.focus) {
        row.classList.add("focus");
        row.id = `break-${this.element.id}`;
      }
      const partner = /sequential (%\d+)/.exec(relation);
      if (partner) row.addEventListener("click", () => panes[0].point(partner[1]));
      return row;
    }
    point(value) {
      const place = this.program.operations.findIndex((operation) => operation[1].startsWith(`${value}:`));
      if (place < 0) return;
      search.value = "";
      lost.checked = false;
      this.first = Math.max(0, place - 20);
      this.draw();
      const row = this.rows.querySelector(`[data-number="${this.program.operations[place][0]}"]`);
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
  function make(tag, kind, text) {
    const element = document.createElement(tag);
    if (kind) element.className = kind;
    if (text !== undefined) element.textContent = text;
    return element;
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
  const button = document.getElementById("to-break");
  if (button) button.addEventListener("click", () => {
    search.value = "";
    lost.checked = false;
    panes.forEach((pane) => pane.show(pane.program));
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && document.activeElement !== search) {
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
