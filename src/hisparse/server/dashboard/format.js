// Figures as people read them.

export const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
export const tenths = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

export function timeOf(value) {
  if (value < 0.01) return [(value * 1000).toFixed(2), "ms"];
  if (value < 1) return [(value * 1000).toFixed(value < 0.1 ? 1 : 0), "ms"];
  return [value.toFixed(value < 10 ? 2 : 1), "s"];
}

export function bytesOf(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let power = 0;
  while (value >= 999.5 && power < units.length - 1) [value, power] = [value / 1000, power + 1];
  return `${value.toFixed(power && value < 100 ? 1 : 0)} ${units[power]}`;
}

export function percentOf(share) {
  return `${tenths.format(100 * share)} %`;
}

export function durationOf(total) {
  const [days, hours, minutes] = [Math.floor(total / 86400), Math.floor(total / 3600) % 24, Math.floor(total / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min` : `${Math.max(0, Math.floor(total))} s`;
}

export function sentence(text) {
  return `${text[0].toUpperCase()}${text.slice(1)}.`;
}
