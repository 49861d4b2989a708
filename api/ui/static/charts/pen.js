/** Two pens that draw the same: one on a canvas for the screen, one that writes SVG for a file. */

const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif';

/** Draws on a canvas, `width` times `height` in CSS pixels. */
export class CanvasPen {
  constructor(canvas, width, height, ratio = devicePixelRatio || 1) {
    this.context = canvas.getContext("2d");
    this.width = width;
    this.height = height;
    const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (canvas.width !== w || canvas.height !== h) {
      canvas.width = w;
      canvas.height = h;
    }
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.context.clearRect(0, 0, width, height);
  }

  /** A line through `xs`, `ys`; a place that is not finite breaks it. */
  line(xs, ys, { color, width = 1, dash = [], alpha = 1 }) {
    const context = this.context;
    Object.assign(context, { strokeStyle: color, lineWidth: width, lineJoin: "round", globalAlpha: alpha });
    context.setLineDash(dash);
    context.beginPath();
    let drawing = false;
    for (let place = 0; place < xs.length; place += 1) {
      const y = ys[place];
      if (Number.isFinite(y)) {
        if (drawing) context.lineTo(xs[place], y);
        else context.moveTo(xs[place], y);
        drawing = true;
      } else {
        drawing = false;
      }
    }
    context.stroke();
    context.setLineDash([]);
    context.globalAlpha = 1;
  }

  /** What lies between `low` and `high`, two lines over `xs`. */
  area(xs, low, high, { color, alpha = 1 }) {
    this.context.globalAlpha = alpha;
    this.context.fillStyle = color;
    this.context.beginPath();
    for (const [x, y] of outlineOf(xs, low, high)) this.context.lineTo(x, y);
    this.context.fill();
    this.context.globalAlpha = 1;
  }

  rectangle(x, y, width, height, { color, alpha = 1 }) {
    this.context.globalAlpha = alpha;
    this.context.fillStyle = color;
    this.context.fillRect(x, y, width, height);
    this.context.globalAlpha = 1;
  }

  outline(x, y, width, height, { color, thickness = 1 }) {
    this.context.strokeStyle = color;
    this.context.lineWidth = thickness;
    this.context.strokeRect(x, y, width, height);
  }

  dot(x, y, radius, { color }) {
    this.context.fillStyle = color;
    this.context.beginPath();
    this.context.arc(x, y, radius, 0, 2 * Math.PI);
    this.context.fill();
  }

  text(x, y, text, { color, size = 11, align = "left", base = "middle", weight = 400 }) {
    Object.assign(this.context, {
      fillStyle: color,
      font: `${weight} ${size}px ${FONT}`,
      textAlign: align,
      textBaseline: base,
    });
    this.context.fillText(text, x, y);
  }

  textWidth(text, size = 11) {
    this.context.font = `400 ${size}px ${FONT}`;
    return this.context.measureText(text).width;
  }

  /** Draw with what `body` draws kept inside of a rectangle. */
  clipped(x, y, width, height, body) {
    this.context.save();
    this.context.beginPath();
    this.context.rect(x, y, width, height);
    this.context.clip();
    body();
    this.context.restore();
  }
}

/** Writes SVG; `svg()` is the whole document. */
export class SvgPen {
  constructor(width, height, ground) {
    this.width = width;
    this.height = height;
    this.parts = [`<rect width="${width}" height="${height}" fill="${ground}"/>`];
    this.clips = 0;
  }

  line(xs, ys, { color, width = 1, dash = [], alpha = 1 }) {
    let [path, drawing] = ["", false];
    for (let place = 0; place < xs.length; place += 1) {
      if (!Number.isFinite(ys[place])) {
        drawing = false;
        continue;
      }
      path += `${drawing ? "L" : "M"}${round(xs[place])} ${round(ys[place])}`;
      drawing = true;
    }
    if (!path) return;
    const dashes = dash.length ? ` stroke-dasharray="${dash.join(" ")}"` : "";
    this.parts.push(
      `<path d="${path}" fill="none" stroke="${color}" stroke-width="${width}" stroke-linejoin="round" opacity="${alpha}"${dashes}/>`,
    );
  }

  area(xs, low, high, { color, alpha = 1 }) {
    const path = outlineOf(xs, low, high).map(([x, y]) => `${round(x)} ${round(y)}`);
    this.parts.push(`<path d="M${path.join("L")}Z" fill="${color}" opacity="${alpha}"/>`);
  }

  rectangle(x, y, width, height, { color, alpha = 1 }) {
    this.parts.push(
      `<rect x="${round(x)}" y="${round(y)}" width="${round(width)}" height="${round(height)}" fill="${color}" opacity="${alpha}"/>`,
    );
  }

  outline(x, y, width, height, { color, thickness = 1 }) {
    this.parts.push(
      `<rect x="${round(x)}" y="${round(y)}" width="${round(width)}" height="${round(height)}" fill="none" stroke="${color}" stroke-width="${thickness}"/>`,
    );
  }

  dot(x, y, radius, { color }) {
    this.parts.push(`<circle cx="${round(x)}" cy="${round(y)}" r="${radius}" fill="${color}"/>`);
  }

  text(x, y, text, { color, size = 11, align = "left", base = "middle", weight = 400 }) {
    const anchor = { left: "start", center: "middle", right: "end" }[align];
    const shift = { middle: 0.35, top: 0.8, bottom: -0.2 }[base] ?? 0;
    this.parts.push(
      `<text x="${round(x)}" y="${round(y + shift * size)}" fill="${color}" font-size="${size}" font-weight="${weight}" text-anchor="${anchor}">${escaped(text)}</text>`,
    );
  }

  textWidth(text, size = 11) {
    return text.length * size * 0.56;
  }

  clipped(x, y, width, height, body) {
    const name = `clip${(this.clips += 1)}`;
    this.parts.push(
      `<clipPath id="${name}"><rect x="${x}" y="${y}" width="${width}" height="${height}"/></clipPath><g clip-path="url(#${name})">`,
    );
    body();
    this.parts.push("</g>");
  }

  svg() {
    const { width, height } = this;
    const font = FONT.replaceAll('"', "&quot;");
    return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" font-family="${font}">${this.parts.join("")}</svg>`;
  }
}

function outlineOf(xs, low, high) {
  const above = [...xs].map((x, place) => [x, high[place]]);
  return [...above, ...[...xs].map((x, place) => [x, low[place]]).reverse()];
}

function round(value) {
  return Math.round(value * 100) / 100;
}

function escaped(text) {
  return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}
