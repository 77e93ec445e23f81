//! Bounds of JSON schemas, checked before llguidance sees one: it descends as deep as a schema and its references do, and holds numbers
//! as f64.

mod unkept;

use serde_json::{Number, Value};
use std::collections::HashSet;
use unkept::Bounds;

/// Schemas within schemas, from the root and from each thing that a reference names, added up: llguidance follows each reference once.
pub const MOST_LEVELS: usize = 512;

/// Properties, names of required ones, alternatives and the like in one place.
pub const MOST_IN_PLACE: usize = 500;

/// The same for patterns of properties: each two of them are compared.
const MOST_PATTERNS: usize = 16;

/// Values of one `enum`.
const MOST_VALUES: usize = 5_000;

/// Properties in all places, and names of required ones.
pub const MOST_NAMES: usize = 1_000;

/// Values of a whole schema; where references name them, once more each time.
const MOST_NODES: usize = 100_000;

/// Bytes of names, values and patterns together.
const MOST_TEXT: usize = 256 << 10;

/// Bytes of one pattern.
const LONGEST_PATTERN: usize = 4_096;

/// What a `multipleOf` is without its point: llguidance has a state for each remainder.
const LARGEST_MULTIPLE: u32 = 10_000;

/// From here on f64 skips whole numbers.
const EXACT: u64 = 1 << 53;

type Result<T> = std::result::Result<T, String>;

/// What a value in a schema is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    Schema,
    /// Schemas by their names.
    Named,
    /// What `const` and `enum` have.
    Literal,
    /// What changes no text.
    Note,
}

impl Place {
    fn of(self, key: &str) -> Self {
        match (self, key) {
            (Self::Named, _) => Self::Schema,
            (Self::Schema, "properties" | "patternProperties" | "$defs" | "definitions" | "dependentSchemas") => {
                Self::Named
            }
            (Self::Schema, "const" | "enum") => Self::Literal,
            (Self::Schema, "default" | "examples" | "title" | "description" | "$comment") => Self::Note,
            (same, _) => same,
        }
    }
}

/// What was counted so far.
struct Check<'a> {
    document: &'a Value,
    most_levels: usize,
    most_names: usize,
    references: HashSet<&'a str>,
    /// Those whose schemas are still to be looked at.
    left: Vec<&'a str>,
    levels: usize,
    nodes: usize,
    properties: usize,
    required: usize,
    text: usize,
    /// Whether a part is of draft 4, and whether one has its name for schemas, `id`.
    fourth: [bool; 2],
    /// Each `multipleOf` without its point, and its digits behind that.
    multiples: Vec<(u32, u32)>,
    bounds: Bounds,
}

/// Whether a schema may be handed on. Errors, as a text: more of something than is taken, references to elsewhere or to nothing, numbers
/// that would be rounded, bounds that would not be kept to, drafts that are not known.
pub fn check(schema: &Value) -> Result<()> {
    check_within(schema, MOST_LEVELS, MOST_NAMES)?.check()
}

/// The same for several that were checked and do not refer to each other: together they are as deep as the deepest.
pub fn check_together(schema: &Value) -> Result<()> {
    check_within(schema, usize::MAX, 4 * MOST_NAMES).map(drop)
}

/// The bounds of numbers in all places.
fn check_within(schema: &Value, most_levels: usize, most_names: usize) -> Result<Bounds> {
    let mut check = Check {
        document: schema,
        most_levels,
        most_names,
        references: HashSet::new(),
        left: Vec::new(),
        levels: 0,
        nodes: 0,
        properties: 0,
        required: 0,
        text: 0,
        fourth: [false; 2],
        multiples: Vec::new(),
        bounds: Bounds::default(),
    };
    check.walk(schema)?;
    while let Some(reference) = check.left.pop() {
        check.walk(resolve(schema, reference)?)?;
    }
    if check.fourth == [true; 2] {
        return Err("'id' is served at the root alone".to_owned());
    }
    have_common_multiple(&check.multiples)?;
    Ok(check.bounds)
}

/// Refuses multiples whose products are beyond 32 bits, in which llguidance computes what is a multiple of each.
fn have_common_multiple(multiples: &[(u32, u32)]) -> Result<()> {
    let digits = multiples.iter().map(|(_, digits)| *digits).max().unwrap_or(0);
    let mut common = 1;
    for (multiple, of) in multiples {
        let multiple = u64::from(*multiple) * 10_u64.pow(digits - of);
        if common * multiple > u64::from(u32::MAX) {
            return Err("the numbers of its 'multipleOf' have no common multiple that can be computed".to_owned());
        }
        let (mut a, mut b) = (common, multiple);
        while b != 0 {
            (a, b) = (b, a % b);
        }
        common *= multiple / a;
    }
    Ok(())
}

/// A `multipleOf` without its point, and its digits behind that. Error: zero, or one that is too large.
fn multiple(number: &Number) -> Result<(u32, u32)> {
    let value = number.as_f64().unwrap_or(f64::NAN).abs();
    let mut scaled = (0..=9).map(|digits| (value * 10_f64.powi(digits), digits as u32));
    match scaled.find(|(scaled, _)| scaled.fract() == 0.0) {
        Some((scaled, digits)) if (1.0..=f64::from(LARGEST_MULTIPLE)).contains(&scaled) => Ok((scaled as u32, digits)),
        _ => {
            Err(format!("the 'multipleOf' {number} is none of 1 to {LARGEST_MULTIPLE}, with or without a point in it"))
        }
    }
}

fn at_most(count: usize, most: usize, of: &str) -> Result<()> {
    if count > most { Err(format!("it has more than {most} {of}")) } else { Ok(()) }
}

impl<'a> Check<'a> {
    /// Looks at what a schema holds, without descending into references, which are noted.
    fn walk(&mut self, root: &'a Value) -> Result<()> {
        let mut deepest = 0;
        let mut left = vec![(root, Place::Schema, 0)];
        while let Some((value, place, above)) = left.pop() {
            self.nodes += 1;
            at_most(self.nodes, MOST_NODES, "values")?;
            let level = above + usize::from(place != Place::Named && (value.is_object() || place == Place::Literal));
            deepest = deepest.max(level);
            match value {
                Value::Object(fields) => {
                    if place == Place::Schema {
                        unkept::check_flags(fields)?;
                        unkept::check_least(fields)?;
                        self.bounds.add(fields)?;
                    }
                    for (key, value) in fields {
                        let inner = place.of(key);
                        if place == Place::Schema {
                            self.keyword(key, value, !std::ptr::eq(root, self.document) || above > 0)?;
                        } else {
                            self.text += key.len();
                        }
                        if inner != Place::Note {
                            left.push((value, inner, level));
                        }
                    }
                }
                Value::Array(list) => left.extend(list.iter().map(|value| (value, place, level))),
                Value::String(text) => self.text += text.len(),
                Value::Number(number) if place == Place::Literal => exact(number, u64::MAX)?,
                Value::Number(_) | Value::Bool(_) | Value::Null => {}
            }
            at_most(self.text, MOST_TEXT, "bytes of names, values and patterns")?;
        }
        self.levels += deepest;
        at_most(self.levels, self.most_levels, "levels of schemas, those of its references included")
    }

    fn keyword(&mut self, key: &str, value: &'a Value, inner: bool) -> Result<()> {
        let count = value.as_array().map(Vec::len).or_else(|| value.as_object().map(serde_json::Map::len));
        match (key, value) {
            ("properties" | "patternProperties", _) => {
                let count = count.unwrap_or(0);
                let most = if key == "properties" { MOST_IN_PLACE } else { MOST_PATTERNS };
                at_most(count, most, &format!("'{key}' in one place"))?;
                self.properties += count;
                at_most(self.properties, self.most_names, "properties")
            }
            ("required", _) => {
                at_most(count.unwrap_or(0), MOST_IN_PLACE, "names in one 'required'")?;
                self.required += count.unwrap_or(0);
                at_most(self.required, self.most_names, "names of required properties")
            }
            ("anyOf" | "oneOf" | "allOf" | "prefixItems" | "items" | "type", Value::Array(_)) => {
                at_most(count.unwrap_or(0), MOST_IN_PLACE, &format!("parts of '{key}'"))
            }
            ("enum", _) => at_most(count.unwrap_or(0), MOST_VALUES, "values of an 'enum'"),
            ("pattern", Value::String(pattern)) => at_most(pattern.len(), LONGEST_PATTERN, "bytes in a 'pattern'"),
            ("minimum" | "maximum", Value::Number(number)) => exact(number, u64::MAX),
            ("multipleOf", Value::Number(number)) => {
                let multiple = multiple(number)?;
                if !self.multiples.contains(&multiple) {
                    self.multiples.push(multiple);
                }
                Ok(())
            }
            // The next number is computed there.
            ("exclusiveMinimum" | "exclusiveMaximum", Value::Number(number)) => exact(number, EXACT),
            ("$ref", Value::String(reference)) => {
                if self.references.insert(reference) {
                    self.left.push(reference);
                }
                Ok(())
            }
            ("$dynamicRef" | "$recursiveRef", _) => Err(format!("'{key}' is not served")),
            ("$id", Value::String(_)) if inner => Err("'$id' is served at the root alone".to_owned()),
            ("$schema", Value::String(name)) => {
                // Later ones have other keywords, beside which those of these mean nothing.
                if let Some(draft) = ["draft-01", "draft-02", "draft-03"].iter().find(|draft| name.contains(**draft)) {
                    return Err(format!("'$schema' names {draft}: schemas are served from draft-04 on"));
                }
                self.fourth[0] |= name.contains("draft-04");
                Ok(())
            }
            ("id", Value::String(_)) => {
                self.fourth[1] |= inner;
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

/// Whether a schema says, itself or where it refers to, that it is of objects.
pub fn is_of_objects(schema: &Value) -> bool {
    let mut at = schema;
    // References may go in circles.
    for _ in 0..MOST_LEVELS {
        match (at.get("type"), at.get("$ref").and_then(Value::as_str).map(|reference| resolve(schema, reference))) {
            (Some(kind), _) => return kind == "object",
            (None, Some(Ok(next))) => at = next,
            (None, _) => return false,
        }
    }
    false
}

/// What a reference names. Errors: nothing, or something elsewhere.
fn resolve<'a>(document: &'a Value, reference: &str) -> Result<&'a Value> {
    let Some(pointer) = reference.strip_prefix('#').filter(|pointer| pointer.is_empty() || pointer.starts_with('/'))
    else {
        return Err(format!("the reference {reference:?} is none within the schema, as '#' and '#/$defs/NAME' are"));
    };
    decoded(pointer)
        .and_then(|pointer| document.pointer(&pointer))
        .ok_or_else(|| format!("the reference {reference:?} names nothing"))
}

/// A text whose bytes may be written as `%` and two digits.
fn decoded(text: &str) -> Option<String> {
    let mut parts = text.split('%');
    let mut bytes = parts.next()?.as_bytes().to_vec();
    for part in parts {
        let (digits, rest) = part.split_at_checked(2)?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        bytes.extend_from_slice(rest.as_bytes());
    }
    String::from_utf8(bytes).ok()
}

/// Refuses a whole number that f64 does not hold, or that is beyond a bound or 63 bits.
fn exact(number: &Number, bound: u64) -> Result<()> {
    let whole = number.as_i64().map(i128::from).or_else(|| number.as_u64().map(i128::from));
    let held = match whole {
        Some(whole) => whole.unsigned_abs() < u128::from(bound).min(1 << 63) && (whole as f64) as i128 == whole,
        // A longer number was rounded when it was read.
        None => number.as_f64().is_some_and(|number| number.abs() < EXACT as f64),
    };
    if held { Ok(()) } else { Err(format!("the number {number} cannot be kept to exactly")) }
}

/// Puts schemas under a name into a document's `$defs`: references within it follow.
pub fn moved(mut schema: Value, name: &str) -> Value {
    if let Some(fields) = schema.as_object_mut() {
        fields.shift_remove("$id");
    }
    let mut left = vec![(&mut schema, Place::Schema)];
    while let Some((value, place)) = left.pop() {
        match value {
            Value::Object(fields) => {
                for (key, value) in fields {
                    match (key.as_str(), &mut *value) {
                        ("$ref", Value::String(reference)) if place == Place::Schema => {
                            if let Some(pointer) = reference.strip_prefix('#') {
                                *reference = format!("#/$defs/{name}{pointer}");
                            }
                        }
                        _ => left.push((value, place.of(key))),
                    }
                }
            }
            Value::Array(list) => left.extend(list.iter_mut().map(|value| (value, place))),
            _ => {}
        }
    }
    schema
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// `count` schemas, by names.
    fn named(count: usize) -> Value {
        (0..count).map(|at| (format!("p{at}"), json!(true))).collect::<serde_json::Map<String, Value>>().into()
    }

    #[test]
    fn more_than_the_bounds_is_refused() {
        let mut deep = json!({"type": "boolean"});
        for _ in 0..MOST_LEVELS {
            check(&deep).unwrap();
            deep = json!({"items": deep});
        }
        let refused = |schema: &Value, why: &str| {
            let told = check(schema).unwrap_err();
            assert!(told.contains(why), "{told}");
        };
        refused(&deep, "levels");
        check(&json!({"properties": named(MOST_IN_PLACE)})).unwrap();
        refused(&json!({"properties": named(MOST_IN_PLACE + 1)}), "properties");
        refused(&json!({"allOf": vec![json!({"properties": named(400)}); 3]}), "properties");
        refused(&json!({"allOf": vec![json!({"required": vec!["a"; 400]}); 3]}), "names");
        refused(&json!({"patternProperties": named(MOST_PATTERNS + 1)}), "patternProperties");
        refused(&json!({"anyOf": vec![true; MOST_IN_PLACE + 1]}), "anyOf");
        check(&json!({"enum": vec!["a"; MOST_VALUES]})).unwrap();
        refused(&json!({"enum": vec!["a"; MOST_VALUES + 1]}), "enum");
        refused(&json!({"const": "a".repeat(MOST_TEXT + 1)}), "bytes");
        refused(&json!({"pattern": "a".repeat(LONGEST_PATTERN + 1)}), "pattern");
        refused(&json!({"prefixItems": vec![json!({"enum": vec![1; 4000]}); 30]}), "values");
        // Names of properties are no keywords, and notes are nothing to keep to.
        check(
            &json!({"properties": {"enum": {"type": "string"}, "$ref": {"type": "string"}, "const": {"items": true}}}),
        )
        .unwrap();
        check(&json!({"description": "a".repeat(MOST_TEXT + 1), "examples": [{"$ref": "nowhere"}]})).unwrap();
    }

    #[test]
    fn references_name_what_is_there() {
        for good in [
            json!({"$ref": "#"}),
            json!({"$defs": {"a/b": true}, "$ref": "#/$defs/a~1b"}),
            json!({"definitions": {"a b": {"anyOf": [{"$ref": "#/definitions/a%20b"}, {"$ref": "#/items"}]}}, "items": {"$ref": "#/definitions/a b"}}),
        ] {
            check(&good).unwrap();
        }
        for bad in ["#/$defs/a", "https://example.org/schema", "#name", "other.json#/a", "#/%zz", ""] {
            assert!(check(&json!({"items": {"$ref": bad}})).unwrap_err().contains("reference"), "{bad}");
        }
        assert!(check(&json!({"items": {"$id": "https://example.org/a"}})).is_err());
        let fourth =
            json!({"$schema": "http://json-schema.org/draft-04/schema#", "items": {"id": "https://example.org/a"}});
        assert!(check(&fourth).is_err());
        check(&json!({"items": {"id": "https://example.org/a"}})).unwrap();
        // A row of references is as deep as one of schemas.
        let row = |count: usize| {
            let of = |at: usize| json!({"$ref": format!("#/$defs/d{}", at + 1)});
            let mut defs: serde_json::Map<String, Value> = (0..count).map(|at| (format!("d{at}"), of(at))).collect();
            defs.insert(format!("d{count}"), json!(true));
            json!({"$defs": defs, "$ref": "#/$defs/d0"})
        };
        check(&row(MOST_LEVELS - 10)).unwrap();
        assert!(check(&row(800)).unwrap_err().contains("levels"));
    }

    #[test]
    fn numbers_that_would_be_rounded_are_refused() {
        let limit = 1_i64 << 53;
        for good in [
            json!({"minimum": -limit, "maximum": limit, "multipleOf": 0.01}),
            json!({"minimum": -1_000_000_000_000_000_000_i64, "maximum": 1_000_000_000_000_000_000_i64}),
            json!({"exclusiveMaximum": limit - 1, "minimum": 0, "exclusiveMinimum": true}),
            json!({"enum": [limit + 2, 0.1, {"a": [1]}], "default": limit + 1}),
        ] {
            check(&good).unwrap();
        }
        for bad in [
            json!({"minimum": limit + 1}),
            json!({"items": {"maximum": i64::MAX}}),
            json!({"minimum": i64::MIN}),
            json!({"maximum": 1_u64 << 63}),
            json!({"maximum": 1e19}),
            json!({"exclusiveMaximum": limit + 2}),
            json!({"const": -limit - 1}),
            json!({"anyOf": [{"enum": ["a", {"b": [limit + 3]}]}]}),
        ] {
            assert!(check(&bad).unwrap_err().contains("exactly"), "{bad}");
        }
    }

    #[test]
    fn multiples_are_small_and_have_a_common_one() {
        let check = |multiples: &[f64]| {
            let all: Vec<Value> = multiples.iter().map(|multiple| json!({"multipleOf": multiple})).collect();
            super::check(&json!({"allOf": all}))
        };
        for good in [&[0.01, 5.0, 10.0, 60.0, 1000.0][..], &[0.1, 0.25, 0.0001], &[10_000.0, 7.0], &[]] {
            check(good).unwrap();
        }
        for bad in [
            &[999_983.0][..],
            &[10_001.0],
            &[0.0],
            &[1e-200],
            &[0.123_456],
            &[9999.0, 0.9999],
            &[9973.0, 9967.0, 9949.0],
        ] {
            assert!(check(bad).unwrap_err().contains("multipleOf"), "{bad:?}");
        }
        assert!(super::check(&json!({"multipleOf": (1_i64 << 53) + 1})).is_err());
    }

    #[test]
    fn what_is_moved_refers_to_itself() {
        let schema = json!({
            "$id": "https://example.org/a", "$defs": {"k": {"items": {"$ref": "#"}}},
            "properties": {"a": {"$ref": "#/$defs/k"}, "$ref": {"const": {"$ref": "#/x"}}},
        });
        let expected = json!({
            "$defs": {"k": {"items": {"$ref": "#/$defs/f0"}}},
            "properties": {"a": {"$ref": "#/$defs/f0/$defs/k"}, "$ref": {"const": {"$ref": "#/x"}}},
        });
        assert_eq!(moved(schema, "f0"), expected);
        assert!(is_of_objects(&json!({"$defs": {"a": {"type": "object"}}, "$ref": "#/$defs/a"})));
        for other in [json!({"type": "array"}), json!({"$ref": "#"}), json!({"anyOf": []}), json!({"type": ["object"]})]
        {
            assert!(!is_of_objects(&other), "{other}");
        }
    }
}
