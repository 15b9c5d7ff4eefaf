//! The samples over time, one small picture per series, as SVG with colours of its own for light and for dark.

use std::fmt::Write as _;

use crate::samples::{SERIES, Samples, Series};

const WIDTH: f64 = 420.0;
const HEIGHT: f64 = 96.0;
/// Around each picture: left for the numbers, above for the name.
const LEFT: f64 = 56.0;
const ABOVE: f64 = 34.0;
const COLUMNS: usize = 2;

const STYLE: &str = "<style>\
    .back{fill:#ffffff}.text{fill:#1f2328}.faint{fill:#59636e}.grid{stroke:#d1d9e0}.line{stroke:#0969da}\
    @media (prefers-color-scheme:dark){.back{fill:#0d1117}.text{fill:#e6edf3}.faint{fill:#9198a1}\
    .grid{stroke:#3d444d}.line{stroke:#58a6ff}}\
    text{font-family:system-ui,sans-serif;font-size:11px}.line{fill:none;stroke-width:1.3}</style>";

pub fn draw(samples: &Samples, heading: &str) -> String {
    #[allow(clippy::cast_precision_loss, reason = "a few pictures")]
    let place = |n: usize| ((n % COLUMNS) as f64, (n / COLUMNS) as f64);
    let (columns, rows) = (2.0, place(SERIES.len() + COLUMNS - 1).1);
    let (wide, high) = ((WIDTH + LEFT + 16.0) * columns + 16.0, (HEIGHT + ABOVE + 22.0) * rows + 30.0);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {wide} {high}\" role=\"img\">\
         <title>What a process and its server use over time under mixed load: {heading}</title>{STYLE}\
         <rect class=\"back\" width=\"{wide}\" height=\"{high}\"/>\
         <text class=\"text\" x=\"{LEFT}\" y=\"20\" font-weight=\"bold\">{heading}</text>\n"
    );
    for (n, series) in SERIES.iter().enumerate() {
        let (column, row) = place(n);
        let (x, y) = (column * (WIDTH + LEFT + 16.0) + LEFT, row * (HEIGHT + ABOVE + 22.0) + ABOVE + 28.0);
        let _ = writeln!(
            out,
            "<g transform=\"translate({x} {y})\">{}</g>",
            one(series, &samples.of(n), samples.seconds())
        );
    }
    out + "</svg>\n"
}

/// One series, from zero to a little above its greatest value: what looks flat is flat.
fn one(series: &Series, values: &[(f64, f64)], seconds: f64) -> String {
    let top = ceiling(values.iter().map(|(_, value)| *value).fold(0.0, f64::max));
    let unit = if series.unit.is_empty() { String::new() } else { format!(", {}", series.unit) };
    let mut out = format!("<text class=\"text\" x=\"0\" y=\"-8\">{}{unit}</text>", series.name);
    for part in [0.0, 0.5, 1.0] {
        let y = HEIGHT * (1.0 - part);
        let _ = write!(
            out,
            "<path class=\"grid\" d=\"M0 {y}H{WIDTH}\"/><text class=\"faint\" x=\"-6\" y=\"{}\" text-anchor=\"end\">{}</text>",
            y + 4.0,
            top * part
        );
    }
    for part in [0.0, 0.25, 0.5, 0.75, 1.0] {
        let (x, minutes) = (WIDTH * part, seconds * part / 60.0);
        let _ = write!(
            out,
            "<text class=\"faint\" x=\"{x}\" y=\"{}\" text-anchor=\"middle\">{minutes:.0} min</text>",
            HEIGHT + 14.0
        );
    }
    let mut path = String::new();
    for (at, value) in values {
        let letter = if path.is_empty() { 'M' } else { 'L' };
        let _ = write!(path, "{letter}{:.1} {:.1}", WIDTH * at / seconds, HEIGHT * (1.0 - value / top));
    }
    let _ = write!(out, "<path class=\"line\" d=\"{path}\"/>");
    out
}

/// The next of 1, 2, 4, 10, 20, 40, …
fn ceiling(value: f64) -> f64 {
    let mut top = 1.0;
    for factor in [2.0, 2.0, 2.5].iter().cycle() {
        if top >= value {
            break;
        }
        top *= factor;
    }
    top
}

#[test]
fn a_picture_has_a_line_per_series_within_its_frame() {
    let mut samples = Samples::default();
    for n in 0..10_u32 {
        let values = std::array::from_fn(|_series| (n != 3).then(|| f64::from(n) * 7.0));
        samples.push(std::time::Duration::from_secs(u64::from(n) * 10), values);
    }
    let svg = draw(&samples, "90 s");
    assert_eq!(svg.matches("class=\"line\"").count(), SERIES.len());
    assert!(!svg.contains("NaN") && !svg.contains("inf") && !svg.contains(" -1"), "{svg}");
    let tops = [0.0, 1.5, 4.1, 230.0].map(|value| format!("{}", ceiling(value)));
    assert_eq!(tops, ["1", "2", "10", "400"]);
}
