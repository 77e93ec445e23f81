//! Charts as SVG: lines over axes with names at their ends, and bars.

use std::fmt::Write;

/// Okabe and Ito's colours, which people see apart who do not see all colours; and black.
const COLOURS: [&str; 8] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a6a00", "#000000"];

/// The number of black.
pub const BLACK: usize = COLOURS.len() - 1;

const WIDTH: f64 = 890.0;
const HEIGHT: f64 = 460.0;
/// Left, top, right and bottom of what lies within the axes.
const AREA: [f64; 4] = [86.0, 52.0, 640.0, 396.0];

const STYLE: &str = "<style>text{font:13px system-ui,sans-serif;fill:#222}.title{font-size:16px;font-weight:600}\
.tick{fill:#555;font-size:11px}.grid{stroke:#e3e3e3}</style>";

/// How a series is drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mark {
    /// A line with dots.
    Line,
    /// A dashed line.
    Dashed,
    /// Symbols alone.
    Points,
}

/// Numbers that belong together.
#[derive(Clone, Debug)]
pub struct Series {
    /// Its name; none is written where it is empty.
    pub name: String,
    colour: usize,
    mark: Mark,
    /// x and y.
    pub points: Vec<[f64; 2]>,
}

impl Series {
    pub fn new(name: String, colour: usize, mark: Mark, points: Vec<[f64; 2]>) -> Self {
        let colour = if colour == BLACK { BLACK } else { colour % BLACK };
        Self { name, colour, mark, points }
    }

    fn colour(&self) -> &'static str {
        COLOURS[self.colour]
    }
}

/// An axis.
#[derive(Clone, Debug)]
pub struct Scale {
    name: &'static str,
    is_log: bool,
    /// Where lines are drawn across; none yet where they follow from the numbers.
    ticks: Vec<f64>,
}

impl Scale {
    pub fn linear(name: &'static str, ticks: Vec<f64>) -> Self {
        Self { name, is_log: false, ticks }
    }

    /// Logarithmic, with these ticks, sorted and each once.
    pub fn log(name: &'static str, mut ticks: Vec<f64>) -> Self {
        ticks.sort_by(f64::total_cmp);
        ticks.dedup();
        Self { name, is_log: true, ticks }
    }

    /// Logarithmic, with ticks at 1, 2 and 5 in each decade of the numbers.
    pub fn decades(name: &'static str) -> Self {
        Self { name, is_log: true, ticks: Vec::new() }
    }

    fn of(&self, value: f64) -> f64 {
        if self.is_log { value.log10() } else { value }
    }

    /// The same with ticks around these numbers, and its ends.
    fn fitted(&self, values: impl Iterator<Item = f64> + Clone) -> (Self, [f64; 2]) {
        let mut scale = self.clone();
        let [least, most] = [f64::INFINITY, f64::NEG_INFINITY];
        let (low, high) = values.fold((least, most), |(low, high), v| (low.min(v), high.max(v)));
        if scale.ticks.is_empty() {
            let steps = (-9..12).flat_map(|e| [1.0, 2.0, 5.0].map(|digit| digit * 10f64.powi(e)));
            let steps: Vec<f64> = steps.collect();
            let first = steps.iter().rposition(|&step| step <= low).unwrap_or(0);
            let last = steps.iter().position(|&step| step >= high).unwrap_or(steps.len() - 1);
            scale.ticks = steps[first..=last].to_vec();
        }
        let low = scale.ticks.first().map_or(low, |&tick| tick.min(low));
        let high = scale.ticks.last().map_or(high, |&tick| tick.max(high));
        let ends = [scale.of(low), scale.of(high)];
        (scale, ends)
    }
}

/// Lines over axes.
#[derive(Clone, Debug)]
pub struct Chart {
    pub title: String,
    pub x: Scale,
    pub y: Scale,
    pub series: Vec<Series>,
}

impl Chart {
    pub fn draw(&self) -> String {
        let values = |axis: usize| self.series.iter().flat_map(move |s| s.points.iter().map(move |p| p[axis]));
        let ((x, x_ends), (y, y_ends)) = (self.x.fitted(values(0)), self.y.fitted(values(1)));
        let [left, top, right, bottom] = AREA;
        let part = |scale: &Scale, [low, high]: [f64; 2], v: f64| (scale.of(v) - low) / (high - low).max(1e-9);
        let x_at = |v: f64| left + 14.0 + part(&x, x_ends, v) * (right - left - 28.0);
        let y_at = |v: f64| bottom - part(&y, y_ends, v) * (bottom - top);
        let mut out = begin(HEIGHT, &self.title);
        for &tick in &x.ticks {
            let at = x_at(tick);
            put(&mut out, format_args!("<path class=\"grid\" d=\"M{at:.1} {top}V{bottom}\"/>"));
            put(
                &mut out,
                format_args!(
                    "<text class=\"tick\" x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{tick}</text>",
                    bottom + 18.0
                ),
            );
        }
        for &tick in &y.ticks {
            let at = y_at(tick);
            put(&mut out, format_args!("<path class=\"grid\" d=\"M{left} {at:.1}H{right}\"/>"));
            put(
                &mut out,
                format_args!(
                    "<text class=\"tick\" x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{tick}</text>",
                    left - 8.0,
                    at + 4.0
                ),
            );
        }
        let middle = (left + right) / 2.0;
        put(
            &mut out,
            format_args!(
                "<text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
                bottom + 42.0,
                escaped(x.name)
            ),
        );
        let middle = (top + bottom) / 2.0;
        put(
            &mut out,
            format_args!(
                "<text x=\"18\" y=\"{middle}\" text-anchor=\"middle\" transform=\"rotate(-90 18 {middle})\">{}</text>",
                escaped(y.name)
            ),
        );
        for series in &self.series {
            let points: Vec<[f64; 2]> = series.points.iter().map(|&[x, y]| [x_at(x), y_at(y)]).collect();
            draw_series(&mut out, series, &points);
        }
        self.names(&mut out, &x_at, &y_at);
        out + "</svg>\n"
    }

    /// Names: at the ends of lines, as far apart as letters need; of symbols, which end nowhere, one below the other.
    fn names(&self, out: &mut String, x_at: &dyn Fn(f64) -> f64, y_at: &dyn Fn(f64) -> f64) {
        let named = self.series.iter().enumerate().filter(|(_, series)| !series.name.is_empty());
        let points = self.series.iter().any(|series| series.mark == Mark::Points);
        let mut places: Vec<(f64, &Series)> = named
            .filter_map(|(i, series)| {
                let end = y_at(series.points.last()?[1]);
                Some((
                    if points && series.mark == Mark::Points { AREA[1] + 10.0 + 20.0 * i as f64 } else { end },
                    series,
                ))
            })
            .collect();
        places.sort_by(|a, b| a.0.total_cmp(&b.0));
        // Each at least a line's height below the one above; then all up again as far as the area's end asks.
        for i in 1..places.len() {
            places[i].0 = places[i].0.max(places[i - 1].0 + 17.0);
        }
        let mut most = AREA[3];
        for place in places.iter_mut().rev() {
            place.0 = place.0.min(most);
            most = place.0 - 17.0;
        }
        for (at, series) in places {
            let colour = series.colour();
            let from = AREA[2] + 34.0;
            if series.mark == Mark::Points {
                symbol(out, series, [AREA[2] + 24.0, at]);
            } else if let Some(&[x, y]) = series.points.last() {
                let (x, y) = (x_at(x) + 6.0, y_at(y));
                put(
                    out,
                    format_args!(
                        "<path d=\"M{x:.1} {y:.1}L{:.1} {at:.1}\" stroke=\"{colour}\" stroke-width=\"0.7\" fill=\"none\"/>",
                        from - 5.0
                    ),
                );
            }
            put(
                out,
                format_args!(
                    "<text x=\"{from}\" y=\"{:.1}\" style=\"fill:{colour}\">{}</text>",
                    at + 4.5,
                    escaped(&series.name)
                ),
            );
        }
    }
}

fn draw_series(out: &mut String, series: &Series, points: &[[f64; 2]]) {
    let colour = series.colour();
    if series.mark != Mark::Points {
        let mut path = String::new();
        for (i, [x, y]) in points.iter().enumerate() {
            write!(path, "{}{x:.1} {y:.1}", if i == 0 { "M" } else { "L" }).expect("texts grow");
        }
        let dashes = if series.mark == Mark::Dashed { " stroke-dasharray=\"5 4\" opacity=\"0.75\"" } else { "" };
        let width = if series.mark == Mark::Dashed { 1.3 } else { 2.2 };
        put(
            out,
            format_args!("<path d=\"{path}\" stroke=\"{colour}\" stroke-width=\"{width}\" fill=\"none\"{dashes}/>"),
        );
    }
    if series.mark != Mark::Dashed {
        points.iter().for_each(|&point| symbol(out, series, point));
    }
}

/// A dot; of points another form for each series.
fn symbol(out: &mut String, series: &Series, [x, y]: [f64; 2]) {
    let colour = series.colour();
    let form = if series.mark == Mark::Points { series.colour % 4 } else { 0 };
    match form {
        0 => put(out, format_args!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.6\" fill=\"{colour}\"/>")),
        1 => put(out, format_args!("<path d=\"M{:.1} {:.1}h7.6v7.6h-7.6z\" fill=\"{colour}\"/>", x - 3.8, y - 3.8)),
        2 => put(out, format_args!("<path d=\"M{x:.1} {:.1}l4.8 8.4h-9.6z\" fill=\"{colour}\"/>", y - 5.2)),
        _ => put(out, format_args!("<path d=\"M{x:.1} {:.1}l5 5l-5 5l-5 -5z\" fill=\"{colour}\"/>", y - 5.0)),
    }
}

/// Bars side by side, a group below the other.
#[derive(Clone, Debug)]
pub struct Bars {
    pub title: String,
    pub unit: &'static str,
    /// Of the bars in each group.
    pub names: Vec<String>,
    /// What each group is, and its bars.
    pub groups: Vec<(String, Vec<f64>)>,
}

impl Bars {
    pub fn draw(&self) -> String {
        let (left, right, top, bar) = (250.0, WIDTH - 80.0, 52.0 + 20.0 * self.names.len() as f64, 13.0);
        let group = bar * self.names.len() as f64 + 12.0;
        let most = self.groups.iter().flat_map(|(_, bars)| bars).fold(0.0f64, |most, &v| most.max(v));
        let mut out = begin(top + group * self.groups.len() as f64 + 16.0, &self.title);
        for (i, name) in self.names.iter().enumerate() {
            let at = 46.0 + 20.0 * i as f64;
            put(
                &mut out,
                format_args!(
                    "<rect x=\"{left}\" y=\"{at}\" width=\"12\" height=\"12\" fill=\"{}\"/>",
                    COLOURS[i % BLACK]
                ),
            );
            put(&mut out, format_args!("<text x=\"{}\" y=\"{}\">{}</text>", left + 20.0, at + 11.0, escaped(name)));
        }
        for (g, (name, bars)) in self.groups.iter().enumerate() {
            let begins = top + group * g as f64;
            let middle = begins + (group - 12.0) / 2.0 + 4.5;
            put(
                &mut out,
                format_args!(
                    "<text x=\"{}\" y=\"{middle:.1}\" text-anchor=\"end\">{}</text>",
                    left - 10.0,
                    escaped(name)
                ),
            );
            for (i, value) in bars.iter().enumerate() {
                let (at, width) = (begins + bar * i as f64, value / most * (right - left));
                let colour = COLOURS[i % BLACK];
                put(
                    &mut out,
                    format_args!(
                        "<rect x=\"{left}\" y=\"{at:.1}\" width=\"{width:.1}\" height=\"{}\" fill=\"{colour}\"/>",
                        bar - 1.5
                    ),
                );
                put(
                    &mut out,
                    format_args!(
                        "<text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\">{value:.0} {}</text>",
                        left + width + 5.0,
                        at + 10.5,
                        self.unit
                    ),
                );
            }
        }
        out + "</svg>\n"
    }
}

fn begin(height: f64, title: &str) -> String {
    let title = escaped(title);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" role=\"img\">\n\
<title>{title}</title>\n{STYLE}\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n<text class=\"title\" x=\"24\" y=\"30\">{title}</text>\n"
    )
}

fn put(out: &mut String, element: std::fmt::Arguments<'_>) {
    writeln!(out, "{element}").expect("texts grow");
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
