"use strict";
const tip = document.getElementById("tip");

for (const chart of document.querySelectorAll(".chart")) {
  const labels = JSON.parse(chart.dataset.labels);
  for (const plot of chart.querySelectorAll(".plot")) {
    const pixels = JSON.parse(plot.dataset.pixels);
    const [line, dot] = plot.querySelectorAll(".pointer");
    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      const x = ((event.clientX - box.left) * plot.viewBox.baseVal.width) / box.width;
      let near = 0;
      pixels.forEach((pixel, i) => {
        if (Math.abs(pixel[0] - x) < Math.abs(pixels[near][0] - x)) near = i;
      });
      line.setAttribute("x1", pixels[near][0]);
      line.setAttribute("x2", pixels[near][0]);
      dot.setAttribute("cx", pixels[near][0]);
      dot.setAttribute("cy", pixels[near][1]);
      plot.classList.add("on");
      tip.textContent = labels[near];
      tip.style.display = "block";
      const right = event.clientX + 14 + tip.offsetWidth > window.innerWidth;
      tip.style.left = (right ? event.clientX - 14 - tip.offsetWidth : event.clientX + 14) + "px";
      tip.style.top = Math.max(event.clientY - tip.offsetHeight - 10, 4) + "px";
    });
    plot.addEventListener("pointerleave", () => {
      plot.classList.remove("on");
      tip.style.display = "none";
    });
  }
}

// Paper has no arrows to click: everything is open while it prints.
let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details:not([open])")];
  opened.forEach((part) => (part.open = true));
});
addEventListener("afterprint", () => opened.forEach((part) => (part.open = false)));
