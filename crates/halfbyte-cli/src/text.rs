//! Words and numbers for people: the two streams, texts that are read, tables, units.

use crate::escape::{escaped, safe_prose};
use crate::failure::{Exit, Failure, Result};
use halfbyte_checkpoint::regular::read_at_most;
use std::borrow::Cow;
use std::io::{self, IsTerminal, Read, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// Characters of a cell that are shown, lest one name widens every row of its table.
const LONGEST_CELL: usize = 200;

/// The longest text that is read whole, in bytes.
const LONGEST_TEXT: u64 = 1 << 28;

/// What is wrong with a text in TOML, in one line.
pub fn toml_cause(text: &str, error: &toml::de::Error) -> String {
    let line = error.span().map(|span| text.bytes().take(span.start).filter(|&byte| byte == b'\n').count() + 1);
    line.map(|line| format!("line {line}: ")).unwrap_or_default() + error.message()
}

/// Reads a text: a regular file, or standard input for `-`. Errors: those of the system, a text that is no UTF-8 or absurdly
/// long.
pub fn read_text(path: &Path) -> Result<String> {
    let refuse = |cause: String| Failure::new(Exit::Input, format!("cannot read {}", path.display()), cause, READABLE);
    let bytes = if path.as_os_str() == "-" {
        let mut bytes = Vec::new();
        let read = io::stdin().lock().take(LONGEST_TEXT + 1).read_to_end(&mut bytes);
        if read.map_err(|e| refuse(e.to_string()))? as u64 > LONGEST_TEXT {
            return Err(refuse(format!("expected at most {LONGEST_TEXT} bytes, got more")));
        }
        bytes
    } else {
        read_at_most(path, LONGEST_TEXT).map_err(|error| match error {
            halfbyte_checkpoint::Error::Malformed { what, .. } => refuse(what),
            other => other.into(),
        })?
    };
    let text = String::from_utf8(bytes).map_err(|e| refuse(format!("expected UTF-8: {e}")))?;
    // A mark of UTF-8 before a text is none of it.
    Ok(text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text))
}

const READABLE: &str =
    "texts are regular files in UTF-8, of at most 256 MiB; - reads standard input, which may be a pipe";

/// Writes text that a model made to standard output: as it is, unless that is a terminal.
pub fn write_prose(text: &str) -> Result<()> {
    if io::stdout().is_terminal() { write_output(&safe_prose(text)) } else { write_output(text) }
}

/// Whether another rank writes what this one would.
static SILENT: AtomicBool = AtomicBool::new(false);

/// From now on nothing goes to standard output: another rank writes the same.
pub fn silence() {
    SILENT.store(true, Ordering::Relaxed);
}

/// Writes to standard output, all at once.
pub fn write_output(text: &str) -> Result<()> {
    if SILENT.load(Ordering::Relaxed) {
        return Ok(());
    }
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

/// A table with aligned columns, a header line, and two spaces between columns; cells are [`escaped`], and
/// cut where they are long.
pub fn table(columns: &[(&str, Align)], rows: &[Vec<String>]) -> String {
    let rows: Vec<Vec<Cow<'_, str>>> = rows.iter().map(|row| row.iter().map(|text| cell(text)).collect()).collect();
    let width = |text: &str| text.chars().count();
    let widths: Vec<usize> = columns
        .iter()
        .enumerate()
        .map(|(i, (name, _))| rows.iter().map(|row| width(&row[i])).fold(width(name), usize::max))
        .collect();
    let header: Vec<Cow<'_, str>> = columns.iter().map(|(name, _)| Cow::Borrowed(*name)).collect();
    let mut out = String::new();
    for row in std::iter::once(&header).chain(&rows) {
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

fn cell(text: &str) -> Cow<'_, str> {
    let text = escaped(text);
    match text.char_indices().nth(LONGEST_CELL) {
        None => text,
        Some(_) => Cow::Owned(cut(&text, LONGEST_CELL)),
    }
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

/// A number of things: `1 token`, `2 tokens`.
pub fn several(number: usize, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
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
        assert_eq!([0, 1, 2].map(|number| several(number, "token")), ["0 tokens", "1 token", "2 tokens"]);
        assert_eq!([rate(12.34), rate(1234.5)], ["12.3", "1234"]);
        assert_eq!([cut("abc", 3), cut("abcd", 3)], ["abc", "ab…"]);
    }
    #[test]
    fn cells_are_escaped_and_cut() {
        assert_eq!(
            table(&[("name", Align::Left)], &[vec!["x".repeat(500)]]).lines().nth(1),
            Some(&*("x".repeat(199) + "…"))
        );
        let rows = [vec!["a\nno problems found".into()]];
        assert_eq!(table(&[("name", Align::Left)], &rows), "name\na\\nno problems found\n");
    }
}
