// Numbers and times as text.

export function count(value) {
  if (value === null || value === undefined) return "–";
  if (Math.abs(value) >= 1e6) return `${trim(value / 1e6)}M`;
  if (Math.abs(value) >= 1e4) return `${trim(value / 1e3)}k`;
  return trim(value);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0995) return `${trim(value * 1000)} ms`;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 120) return `${trim(value)} s`;
  return `${Math.round(value / 60)} min`;
}

export function percent(value) {
  if (value === null || value === undefined) return "–";
  return `${trim(value * 100)} %`;
}

export function bytes(value) {
  if (value < 1024) return `${value} B`;
  const power = Math.min(4, Math.floor(Math.log2(value) / 10));
  return `${trim(value / 1024 ** power)} ${["", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

export function clock(unixSeconds) {
  return new Date(unixSeconds * 1000).toTimeString().slice(0, 8);
}

export function plural(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

function trim(value) {
  const digits = Math.abs(value) < 10 && !Number.isInteger(value) ? 1 : 0;
  return value.toFixed(digits);
}
