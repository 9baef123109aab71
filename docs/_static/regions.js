// Lets the keyboard reach what is wider than its place: code, outputs, tables and formulas.
"use strict";

function markWideRegions() {
  const wide = "pre, .table-wrapper, .output, .cell_output > div, div.math, .explorer-figure";
  for (const element of document.querySelectorAll(wide)) {
    if (element.scrollWidth > element.clientWidth || element.scrollHeight > element.clientHeight) {
      if (!element.hasAttribute("tabindex")) element.setAttribute("tabindex", "0");
    }
  }
}

document.addEventListener("DOMContentLoaded", markWideRegions);
window.addEventListener("resize", markWideRegions);
document.addEventListener("toggle", markWideRegions, true);
