//! Stop strings in a stream of text.

use crate::error::{Error, Result};
use std::ops::RangeInclusive;

/// Bytes of a stop string: one of none says nothing, and text is held back as long as one may come.
const STOP_BYTES: RangeInclusive<usize> = 1..=1024;

/// Lets text pass until a stop string comes, and holds back what may be the beginning of one.
#[derive(Clone, Debug)]
pub struct StopFilter<'a> {
    stops: &'a [String],
    held: String,
}

/// What a piece of text brought.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Passed {
    /// Text that may be shown.
    pub text: String,
    /// Whether a stop string came; it and what follows are dropped.
    pub stopped: bool,
}

impl<'a> StopFilter<'a> {
    /// Error: a stop string of no bytes, or of more than 1024.
    pub fn check(stops: &[String]) -> Result<()> {
        match stops.iter().find(|text| !STOP_BYTES.contains(&text.len())) {
            Some(text) => {
                let expected = format!("texts of {} to {} bytes", STOP_BYTES.start(), STOP_BYTES.end());
                Err(Error::invalid("stop", expected, format!("one of {}", text.len())))
            }
            None => Ok(()),
        }
    }

    /// Empty stop strings are none.
    pub fn new(stops: &'a [String]) -> Self {
        Self { stops, held: String::new() }
    }

    /// Takes a piece of text; gives what is certain not to begin a stop string.
    pub fn push(&mut self, text: &str) -> Passed {
        self.held.push_str(text);
        let stops = || self.stops.iter().filter(|s| !s.is_empty());
        if let Some(at) = stops().filter_map(|s| self.held.find(s.as_str())).min() {
            self.held.truncate(at);
            return Passed { text: std::mem::take(&mut self.held), stopped: true };
        }
        let may_begin = |at: &usize| stops().any(|s| s.starts_with(&self.held[*at..]));
        let keep_from = self.held.char_indices().map(|(at, _)| at).find(may_begin).unwrap_or(self.held.len());
        let rest = self.held.split_off(keep_from);
        Passed { text: std::mem::replace(&mut self.held, rest), stopped: false }
    }

    /// Ends the text; gives what was held back.
    pub fn finish(self) -> String {
        self.held
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_string_over_several_pieces_is_never_shown() {
        let stops = ["\n\nclass".to_owned(), "END".to_owned(), String::new()];
        let mut filter = StopFilter::new(&stops);
        let mut shown = String::new();
        for piece in ["a\n", "\nb", " E", "N", "é", "\n", "\ncl", "ass C"] {
            let passed = filter.push(piece);
            shown.push_str(&passed.text);
            if passed.stopped {
                assert_eq!(shown, "a\n\nb ENé");
                return;
            }
        }
        panic!("the stop string was missed");
    }

    #[test]
    fn stop_strings_have_1_to_1024_bytes() {
        let check = |texts: &[&str]| StopFilter::check(&texts.iter().map(ToString::to_string).collect::<Vec<_>>());
        let long = "é".repeat(512);
        assert!(check(&[]).is_ok() && check(&["x", &long]).is_ok());
        for (refused, len) in [("", 0), (&*(long + "x"), 1025)] {
            let error = check(&["x", refused]).unwrap_err().to_string();
            assert_eq!(error, format!("stop: expected texts of 1 to 1024 bytes, got one of {len}"));
        }
    }

    #[test]
    fn the_earliest_of_several_wins_and_held_text_comes_at_the_end() {
        let stops = ["xyz".to_owned(), "b".to_owned()];
        let mut filter = StopFilter::new(&stops);
        assert_eq!(filter.push("abxyz"), Passed { text: "a".to_owned(), stopped: true });
        let mut filter = StopFilter::new(&stops);
        assert_eq!(filter.push("axy"), Passed { text: "a".to_owned(), stopped: false });
        assert_eq!(filter.finish(), "xy");
    }
}
