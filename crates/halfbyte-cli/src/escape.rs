//! What a terminal may see of foreign text: nothing that acts on it, breaks a line, turns the direction of text or hides.

use std::borrow::Cow;
use std::path::Path;

/// Text from a file, an argument or the system as part of a line: what acts on a terminal, breaks lines, turns the
/// direction of text or is not seen stands there as an escape, `\u{1b}`. What is absurdly long is cut.
pub fn escaped(text: &str) -> Cow<'_, str> {
    let wanted = |c| acts(c) || is_invisible(c);
    match text.char_indices().nth(LONGEST_SHOWN) {
        None => escape(text, wanted),
        Some((at, _)) => Cow::Owned(format!("{}…", escape(&text[..at], wanted))),
    }
}

/// Characters of one text that are shown.
const LONGEST_SHOWN: usize = 4000;

/// A path as part of a line, [`escaped`].
pub fn path(path: &Path) -> String {
    escaped(&path.display().to_string()).into_owned()
}

/// Text of several lines, each of them made of [`escaped`] parts: once more all but the breaks between them.
pub fn escaped_lines(text: &str) -> Cow<'_, str> {
    escape(text, |c| c != '\n' && (acts(c) || is_invisible(c)))
}

/// Text that a model made, as a terminal may have it: lines, tabs and the joiners of scripts and emoji stay.
pub fn safe_prose(text: &str) -> Cow<'_, str> {
    escape(text, |c| acts(c) && !matches!(c, '\n' | '\t'))
}

/// A JSON text in which nothing acts on a terminal either: the same value.
pub fn safe_json(json: &str) -> Cow<'_, str> {
    // What JSON has besides strings is ASCII that is seen.
    replace(
        json,
        |c| acts(c) || is_invisible(c),
        |c, out| {
            for unit in c.encode_utf16(&mut [0; 2]) {
                *out += &format!("\\u{unit:04x}");
            }
        },
    )
}

/// Whether a character moves the cursor, begins a command to the terminal, ends a line, or turns the direction of text.
fn acts(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{206f}')
        || matches!(c, '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// Whether a character takes no room, so that names may differ without being seen to.
fn is_invisible(c: char) -> bool {
    matches!(c, '\u{ad}' | '\u{34f}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}' | '\u{180b}'..='\u{180f}')
        || matches!(c, '\u{200b}'..='\u{200d}' | '\u{2060}'..='\u{2065}' | '\u{3164}' | '\u{fe00}'..='\u{fe0f}')
        || matches!(c, '\u{feff}' | '\u{ffa0}' | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}')
        || matches!(c, '\u{e0080}'..='\u{e0fff}')
}

fn escape(text: &str, wanted: impl Fn(char) -> bool) -> Cow<'_, str> {
    replace(text, wanted, |c, out| match c {
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        c => out.extend(c.escape_unicode()),
    })
}

fn replace(text: &str, wanted: impl Fn(char) -> bool, by: impl Fn(char, &mut String)) -> Cow<'_, str> {
    if !text.contains(&wanted) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if wanted(c) { by(c, &mut out) } else { out.push(c) }
    }
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_acts_on_a_terminal_passes_and_plain_text_does() {
        let plain = "a `b`: 3 × 4 µs, 中文 🙂 é \\n ~";
        for same in [escaped(plain), escaped_lines(plain), safe_prose(plain), safe_json(plain)] {
            assert_eq!(same, plain);
        }
        assert_eq!(escaped("a\nb\tc\r\u{1b}[31m\u{7f}\u{9b}"), r"a\nb\tc\r\u{1b}[31m\u{7f}\u{9b}");
        assert_eq!(escaped_lines("a\u{1b}\nb"), "a\\u{1b}\nb");
        let directions = ['\u{200e}', '\u{200f}', '\u{61c}'].into_iter();
        for c in
            directions.chain('\u{202a}'..='\u{202e}').chain('\u{2066}'..='\u{2069}').chain(['\u{2028}', '\u{e0041}'])
        {
            let text = format!("a{c}b");
            for shown in [escaped(&text), escaped_lines(&text), safe_prose(&text)] {
                assert_eq!(shown, format!("a\\u{{{:x}}}b", c as u32));
            }
        }
        for c in ['\u{200b}', '\u{200d}', '\u{2060}', '\u{feff}', '\u{ad}'] {
            assert_eq!(escaped(&c.to_string()), format!("\\u{{{:x}}}", c as u32));
        }
        assert_eq!(safe_prose("x:\n\ty\r\u{1b}]0;t\u{7} 👩\u{200d}🚀"), "x:\n\ty\\r\\u{1b}]0;t\\u{7} 👩\u{200d}🚀");
        let value = serde_json::json!({"\u{202e}a": "\u{9b}\u{7f}\u{e0041}\n"});
        let json = value.to_string();
        let safe = safe_json(&json);
        assert_eq!(safe, r#"{"\u202ea":"\u009b\u007f\udb40\udc41\n"}"#);
        assert_eq!(serde_json::from_str::<serde_json::Value>(&safe).unwrap(), value);
        assert_eq!(escaped(&"é".repeat(5000)), "é".repeat(4000) + "…");
    }
}
