// Explorers without a kernel: their controls, and who answers for the chosen values. That is labkit's own Python in this
// page, started by the first change, or where the book carries none, its list of answers for all positions.
"use strict";

(() => {
  const home = new URL("live/", document.currentScript.src);
  const live = (window.labkitLive = window.labkitLive || {});
  const loaded = {};

  // A page from a folder may load scripts, and may fetch nothing.
  const load = (name) =>
    (loaded[name] ||= new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = new URL(name, home);
      script.onload = resolve;
      script.onerror = () => reject(new Error(`the book lacks ${name}`));
      document.head.append(script);
    }));

  async function unpack(text) {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
  }

  let python;
  async function startPython() {
    await Promise.all([load("pyodide.js"), load("python.js")]);
    const parts = live.python;
    const [wasm, module, library, sources] = await Promise.all(
      [parts.wasm, parts.module, parts.library, parts.sources].map(unpack),
    );
    const address = URL.createObjectURL(new Blob([module], { type: "text/javascript" }));
    const { default: createPyodideModule } = await import(address);
    // Pyodide fetches these two by their names.
    const files = { "pyodide.asm.wasm": [wasm, "application/wasm"], "python_stdlib.zip": [library, "application/zip"] };
    const fetch = window.fetch;
    window.fetch = (url, ...more) => {
      const file = files[String(url).split("/").pop()];
      return file
        ? Promise.resolve(new Response(file[0], { headers: { "content-type": file[1] } }))
        : fetch(url, ...more);
    };
    try {
      const runtime = await loadPyodide({
        indexURL: home.href,
        packageBaseUrl: home.href,
        createPyodideModule,
        lockFileContents: parts.lock,
      });
      runtime.unpackArchive(sources, "zip", { extractDir: "/labkit" });
      runtime.runPython(
        "import sys; sys.path.insert(0, '/labkit')\n" +
          "from pathlib import Path; from docs.live import stand_ins; stand_ins.install(Path('/labkit'))",
      );
      return runtime;
    } finally {
      window.fetch = fetch;
    }
  }

  async function ask(explorer, chosen) {
    if (!explorer.python) {
      await load(`${explorer.name}.js`);
      if (typeof live[explorer.name] === "string") {
        live[explorer.name] = JSON.parse(new TextDecoder().decode(await unpack(live[explorer.name])));
      }
      return live[explorer.name][explorer.controls.map((control) => chosen[control.key]).join(",")];
    }
    python ||= startPython();
    const runtime = await python;
    const given = runtime.toPy({ name: explorer.name, chosen: JSON.stringify(chosen) });
    return JSON.parse(runtime.runPython(live.python.run, { globals: given }));
  }

  function controlOf(explorer, control, id) {
    const place = document.createElement("div");
    const label = document.createElement("label");
    place.append(label);
    label.htmlFor = id;
    label.textContent = control.label;
    if (explorer.python && control.any) {
      const input = document.createElement("input");
      const list = document.createElement("datalist");
      Object.assign(input, { type: "number", id, min: control.any.min, max: control.any.max });
      input.step = control.any.whole ? 1 : "any";
      input.value = input.defaultValue = control.any.values[control.chosen];
      list.id = `${id}-values`;
      list.append(...control.any.values.map((value) => new Option(value, value)));
      input.setAttribute("list", list.id);
      place.append(input, list);
      return { place, value: () => ({ number: input.value === "" ? NaN : Number(input.value) }) };
    }
    const select = document.createElement("select");
    select.id = id;
    control.options.forEach((text, number) => {
      const isDefault = number === control.chosen;
      select.append(new Option(text, number, isDefault, isDefault));
    });
    place.append(select);
    return { place, value: () => Number(select.value) };
  }

  function mount(element, number) {
    const explorer = JSON.parse(element.querySelector("script").textContent);
    const [form, figure, words, body, status] = ["form", ".explorer-figure", ".explorer-words", "tbody", ".explorer-status"].map(
      (name) => element.querySelector(name),
    );
    const controls = explorer.controls.map((control, place) =>
      controlOf(explorer, control, `explorer-${number}-${place}`),
    );
    const reset = Object.assign(document.createElement("button"), { type: "reset", textContent: "reset" });
    form.append(...controls.map((control) => control.place), reset);
    form.hidden = false;
    form.setAttribute("aria-label", explorer.title);
    let asked = 0;

    async function show() {
      const mine = (asked += 1);
      const chosen = Object.fromEntries(controls.map((each, place) => [explorer.controls[place].key, each.value()]));
      if (explorer.python && !python) status.textContent = "Python starts in this page, which takes some seconds …";
      let said;
      try {
        said = await ask(explorer, chosen);
      } catch (error) {
        said = { error: `This browser cannot run the explorer: ${error}` };
      }
      if (mine !== asked) return;
      element.classList.toggle("refused", "error" in said);
      status.textContent = said.error || "";
      element.dataset.answered = mine;
      if (said.error) return;
      figure.innerHTML = said.svg;
      words.textContent = said.words;
      body.replaceChildren(
        ...said.rows.map(([name, text]) => {
          const row = document.createElement("tr");
          const head = Object.assign(document.createElement("th"), { scope: "row", textContent: name });
          row.append(head, Object.assign(document.createElement("td"), { textContent: text }));
          return row;
        }),
      );
    }

    form.addEventListener("change", show);
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => setTimeout(show));
  }

  document.addEventListener("DOMContentLoaded", () => document.querySelectorAll(".explorer").forEach(mount));
})();
