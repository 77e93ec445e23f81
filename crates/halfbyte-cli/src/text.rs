//! Words and numbers for people: writing to the two streams, tables, units.

use crate::failure::{Failure, Result};
use std::io::{self, Write};
use std::path::Path;

/// Writes to standard output, all at once.
pub fn write_output(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|e| match e.kind() {
        io::ErrorKind::BrokenPipe => Failure::PipeClosed,
        _ => Failure::io("write to", Path::new("standard output"), &e),
    })
}

/// Writes to standard error; there is nobody to tell if that fails.
pub fn write_error(text: &str) {
    let _ = io::stderr().lock().write_all(text.as_bytes());
}

/// How a column is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    /// Words.
    Left,
    /// Numbers.
    Right,
}

/// A table with aligned columns, a header line, and two spaces between columns.
pub fn table(columns: &[(&str, Align)], rows: &[Vec<String>]) -> String {
    let width = |text: &str| text.chars().count();
    let widths: Vec<usize> = columns
        .iter()
        .enumerate()
        .map(|(i, (name, _))| rows.iter().map(|row| width(&row[i])).fold(width(name), usize::max))
        .collect();
    let header: Vec<String> = columns.iter().map(|(name, _)| (*name).to_owned()).collect();
    let mut out = String::new();
    for row in std::iter::once(&header).chain(rows) {
        let mut line = String::new();
        for ((cell, &wanted), (_, align)) in row.iter().zip(&widths).zip(columns) {
            let pad = " ".repeat(wanted - width(cell));
            match align {
                Align::Left => line += &format!("{cell}{pad}  "),
                Align::Right => line += &format!("{pad}{cell}  "),
            }
        }
        out += line.trim_end();
        out.push('\n');
    }
    out
}

/// Bytes with a decimal unit: `22.0 MB`.
pub fn bytes(count: u64) -> String {
    let value = count as f64;
    match count {
        0..1_000 => format!("{count} B"),
        1_000..1_000_000 => format!("{:.1} kB", value / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", value / 1e6),
        _ => format!("{:.2} GB", value / 1e9),
    }
}

/// A count with a decimal unit: `11.0 M`.
pub fn count(number: u64) -> String {
    let value = number as f64;
    match number {
        0..10_000 => number.to_string(),
        10_000..1_000_000 => format!("{:.1} k", value / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} M", value / 1e6),
        _ => format!("{:.2} G", value / 1e9),
    }
}

/// A number of at least a few hundred without decimals, a smaller one with some.
pub fn rate(value: f64) -> String {
    if value >= 100.0 { format!("{value:.0}") } else { format!("{value:.1}") }
}

/// Text cut to a number of characters, an ellipsis at the cut.
pub fn cut(text: &str, width: usize) -> String {
    match text.char_indices().nth(width) {
        None => text.to_owned(),
        Some(_) => text.chars().take(width.saturating_sub(1)).chain(['…']).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_align_and_units_change_where_they_should() {
        let rows = [vec!["a".into(), "1".into()], vec!["longer".into(), "200".into()]];
        let text = table(&[("name", Align::Left), ("n", Align::Right)], &rows);
        assert_eq!(text, "name      n\na         1\nlonger  200\n");
        assert_eq!(
            [bytes(999), bytes(1_500), bytes(22_030_080), bytes(4_000_000_000)],
            ["999 B", "1.5 kB", "22.0 MB", "4.00 GB"]
        );
        assert_eq!([count(9_999), count(11_015_040)], ["9999", "11.0 M"]);
        assert_eq!([rate(12.34), rate(1234.5)], ["12.3", "1234"]);
        assert_eq!([cut("abc", 3), cut("abcd", 3)], ["abc", "ab…"]);
    }
}
