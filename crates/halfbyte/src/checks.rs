//! Checks of arguments that functions of every device have.

use crate::error::{Error, Result};
use crate::kernel::CAPS;

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

/// *Errors:* a cap outside of [`CAPS`].
pub(crate) fn check_cap(op: &'static str, cap: f32) -> Result<()> {
    if CAPS.contains(&cap) {
        return Ok(());
    }
    Err(Error::invalid(op, "a cap from 2⁻¹²⁶ to 2¹²⁵", format!("{cap:e}")))
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
    fn caps_are_normal_floats_as_kernels_multiply_and_divide_by_them() {
        assert_eq!(CAPS, 2f32.powi(-126)..=2f32.powi(125));
        for cap in [*CAPS.start(), 1.0, 30.0, *CAPS.end()] {
            assert!(check_cap("test", cap).is_ok());
            let of_two = cap * std::f32::consts::LOG2_E;
            assert!([cap, 1.0 / cap, 2.0 / cap, of_two, 1.0 / of_two, 2.0 * of_two].iter().all(|v| v.is_normal()));
        }
        let below = f32::from_bits(CAPS.start().to_bits() - 1);
        let above = f32::from_bits(CAPS.end().to_bits() + 1);
        for cap in [0.0, -1.0, 1e-39, below, above, 2.4e38, f32::MAX, f32::INFINITY, f32::NAN] {
            assert!(matches!(check_cap("test", cap), Err(Error::Invalid { op: "test", .. })), "{cap:e}");
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
