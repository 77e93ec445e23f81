//! Times of a load as a picture: how many of all answers had their first token, and each further one, within a time.

use super::report::{each, firsts};
use super::{Outcome, Percentiles, Report};
use std::fmt::Write;

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 300.0;
const MARGIN: (f64, f64) = (56.0, 46.0);

/// Two cumulative distributions beside each other, as SVG; `title` is put above.
pub fn svg(title: &str, report: &Report, outcomes: &[Outcome]) -> String {
    let mut out = String::new();
    // A String takes everything.
    let _ = write!(
        out,
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {} {}' font-family='sans-serif' font-size='12'>\n\
         <rect width='100%' height='100%' fill='white'/>\n<text x='{}' y='22' font-size='15'>{}</text>\n\
         <text x='{}' y='40' fill='#555'>{} answers, {} failed, {:.0} new tokens/s, {:.0} prompt tokens/s</text>\n",
        WIDTH * 2.0,
        HEIGHT + 50.0,
        MARGIN.0,
        escaped(title),
        MARGIN.0,
        report.answered,
        report.failed,
        report.new_tokens_per_second,
        report.prompt_tokens_per_second,
    );
    panel(&mut out, 0.0, "time to first token, ms", firsts(outcomes), marks(&report.first_token));
    panel(&mut out, WIDTH, "time a token after the first, ms", each(outcomes), marks(&report.each_token));
    out.push_str("</svg>\n");
    out
}

fn panel(out: &mut String, left: f64, label: &str, mut seconds: Vec<f64>, marks: [f64; 2]) {
    seconds.sort_unstable_by(f64::total_cmp);
    let most = seconds.last().copied().unwrap_or(0.0).max(1e-6) * 1.05;
    let (x0, y0, x1, y1) = (left + MARGIN.0, HEIGHT, left + WIDTH - 20.0, 60.0);
    let x = |value: f64| x0 + (x1 - x0) * value / most;
    let y = |share: f64| y0 - (y0 - y1) * share;
    for step in 0..=4 {
        let share = f64::from(step) / 4.0;
        let _ = writeln!(
            out,
            "<path d='M{x0:.1} {0:.1}H{x1:.1}' stroke='#ddd'/><text x='{1:.1}' y='{2:.1}' text-anchor='end'>{3} %</text>\
             <text x='{4:.1}' y='{5:.1}' text-anchor='middle'>{6}</text>",
            y(share),
            x0 - 6.0,
            y(share) + 4.0,
            25 * step,
            x(most * share),
            y0 + 18.0,
            milliseconds(most * share),
        );
    }
    let mut path = format!("M{:.1} {:.1}", x(0.0), y(0.0));
    for (at, value) in seconds.iter().enumerate() {
        let _ = write!(path, "H{:.1}V{:.1}", x(*value), y((at + 1) as f64 / seconds.len() as f64));
    }
    let _ = writeln!(out, "<path d='{path}' fill='none' stroke='#1d5bb3' stroke-width='2'/>");
    for (name, value) in ["p50", "p99"].iter().zip(marks) {
        let _ = writeln!(
            out,
            "<path d='M{0:.1} {y0:.1}V{y1:.1}' stroke='#a4161a' stroke-dasharray='4 3'/>\
             <text x='{1:.1}' y='{2:.1}' fill='#a4161a' text-anchor='end'>{name} {3}</text>",
            x(value),
            x(value) - 4.0,
            if *name == "p50" { y1 + 12.0 } else { y1 + 28.0 },
            milliseconds(value),
        );
    }
    let _ = writeln!(
        out,
        "<text x='{:.1}' y='{:.1}' text-anchor='middle'>{label}</text>",
        (x0 + x1) / 2.0,
        y0 + MARGIN.1 - 8.0
    );
}

fn milliseconds(seconds: f64) -> String {
    let value = seconds * 1000.0;
    if value >= 100.0 { format!("{value:.0}") } else { format!("{value:.2}") }
}

/// What is marked in a panel: the median and the 99th percentile, if anything was measured.
fn marks(of: &Option<Percentiles>) -> [f64; 2] {
    of.as_ref().map_or([0.0; 2], |of| [of.p50, of.p99])
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_picture_of_none_and_of_some() {
        let one = |n: u64| Outcome {
            sent: Duration::ZERO,
            first: Some(Duration::from_millis(n)),
            whole: Duration::from_millis(10 * n),
            prompt_tokens: 1,
            new_tokens: 4,
            error: None,
        };
        for outcomes in [Vec::new(), (1..50).map(one).collect()] {
            let svg = svg("a < b & c", &Report::of(Duration::from_secs(1), &outcomes), &outcomes);
            assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n") && svg.contains("a &lt; b &amp; c"));
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
    }
}
