//! Checks of arguments that functions of every device have.

use crate::error::{Error, Result};

/// Rows of `row` elements in `len` elements. *Errors:* elements that are no whole rows, rows of no elements, also where there are no
/// elements.
pub(crate) fn rows_of(op: &'static str, len: usize, row: usize) -> Result<usize> {
    match row {
        0 => Err(Error::invalid(op, "rows of at least one element", "rows of none")),
        _ if len.is_multiple_of(row) => Ok(len / row),
        _ => Err(Error::invalid(op, format!("whole rows of {row} elements"), format!("{len} elements"))),
    }
}

/// *Errors:* another number of elements than is expected, or an expected one that is beyond memory (None).
pub(crate) fn same_length(op: &'static str, name: &str, expected: impl Into<Option<usize>>, got: usize) -> Result<()> {
    let expected = expected.into();
    if expected == Some(got) {
        return Ok(());
    }
    let expected = expected.map_or_else(|| "a length that fits memory".to_owned(), |len| format!("{len} elements"));
    Err(Error::invalid(op, format!("{expected} in {name}"), got.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_whole_and_have_elements() {
        for (len, row, rows) in [(0, 1, 0), (0, usize::MAX, 0), (12, 4, 3), (12, 12, 1)] {
            assert_eq!(rows_of("test", len, row).unwrap(), rows);
        }
        for (len, row) in [(0, 0), (12, 0), (12, 5), (12, 24)] {
            let error = rows_of("test", len, row).unwrap_err();
            assert!(matches!(error, Error::Invalid { op: "test", .. }), "{len} elements in rows of {row}: {error}");
        }
    }

    #[test]
    fn lengths_are_those_expected() {
        assert!(same_length("test", "x", 3, 3).is_ok());
        assert!(same_length("test", "x", 3, 4).is_err());
        assert!(same_length("test", "x", 2usize.checked_mul(3), 6).is_ok());
        assert!(same_length("test", "x", usize::MAX.checked_mul(3), 6).is_err());
    }
}
