//! Bounds that llguidance 1.9 takes and does not keep to, which are refused.
//!
//! Numbers: where an exclusive bound is whole, and the other bound differs from it behind the point alone, numbers may stand on it: above 0
//! and at most 0.5 it lets 0 come. Objects: names beside those that a schema has may come twice, and count twice.

use serde_json::{Map, Value};
use std::collections::HashSet;

type Result<T> = std::result::Result<T, String>;

/// What joins schemas, so that a value keeps to several.
const JOINED: [&str; 3] = ["anyOf", "oneOf", "$ref"];

/// What has bounds of numbers, or schemas that have.
const BOUNDED: [&str; 10] = [
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "properties",
    "patternProperties",
    "additionalProperties",
    "items",
    "prefixItems",
    "additionalItems",
];

/// A whole number, by its side of 0 (true: below) and its distance.
type Whole = (bool, u64);

/// Bounds of numbers, of all places of a schema.
#[derive(Default)]
pub struct Bounds {
    /// Those that are whole and exclusive, of numbers further from 0.
    exclusive: HashSet<Whole>,
    /// Those of numbers nearer to 0 that are not whole, without what is behind their point.
    other: HashSet<Whole>,
    /// Whether several places describe one value.
    joined: bool,
}

impl Bounds {
    /// Adds those of a place. Errors: bounds there that would not be kept to.
    pub fn add(&mut self, fields: &Map<String, Value>) -> Result<()> {
        self.joined |= joins(fields);
        if !admits(fields, "number") {
            return Ok(());
        }
        let mut here = Self::default();
        for (below, name, exclusive) in [(false, "minimum", "exclusiveMinimum"), (true, "maximum", "exclusiveMaximum")]
        {
            let bound = fields.get(name).and_then(Value::as_f64);
            let exclusive = match fields.get(exclusive) {
                Some(Value::Bool(true)) => bound,
                value => value.and_then(Value::as_f64),
            };
            let sign = if below { -1.0 } else { 1.0 };
            let whole = exclusive.map(|bound| sign * bound).filter(|bound| *bound >= 0.0 && bound.fract() == 0.0);
            here.exclusive.extend(whole.map(|bound| (below, bound as u64)));
            let others = [bound, exclusive].into_iter().flatten().map(|bound| -sign * bound);
            let others = others.filter(|bound| *bound > 0.0 && bound.fract() != 0.0);
            here.other.extend(others.map(|bound| (!below, bound as u64)));
        }
        here.none_meet()?;
        self.exclusive.extend(here.exclusive);
        self.other.extend(here.other);
        Ok(())
    }

    /// Errors: bounds that would not be kept to if they were of one value, where schemas are joined.
    pub fn check(&self) -> Result<()> {
        if self.joined { self.none_meet() } else { Ok(()) }
    }

    fn none_meet(&self) -> Result<()> {
        let Some(&(below, distance)) = self.exclusive.intersection(&self.other).min() else { return Ok(()) };
        let (name, sign) = if below { ("exclusiveMaximum", "-") } else { ("exclusiveMinimum", "") };
        let sign = if distance == 0 { "" } else { sign };
        Err(format!("'{name}' {sign}{distance} cannot be kept to with another bound that is less than 1 away from it"))
    }
}

/// Whether a value that keeps to a schema keeps to several parts of it that may have bounds.
fn joins(fields: &Map<String, Value>) -> bool {
    let count = |names: &[&str]| names.iter().filter(|name| fields.contains_key(**name)).count();
    let all_of = fields.get("allOf").and_then(Value::as_array).map_or(0, Vec::len);
    all_of + count(&JOINED) + count(&BOUNDED).min(1) > 1 || count(&["properties", "patternProperties"]) == 2
}

/// Whether values of a type may be what a schema describes.
fn admits(fields: &Map<String, Value>, name: &str) -> bool {
    match fields.get("type") {
        Some(Value::Array(types)) => types.iter().any(|one| one == name),
        Some(one) => one == name,
        None => true,
    }
}

/// Refuses `true` as an exclusive bound where llguidance does not see the bound that it is of.
pub fn check_flags(fields: &Map<String, Value>) -> Result<()> {
    let apart = ["const", "enum", "allOf"].iter().chain(&JOINED).any(|name| fields.contains_key(*name));
    for (flag, bound) in [("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")] {
        if fields.get(flag) == Some(&Value::Bool(true)) && (apart || !fields.contains_key(bound)) {
            return Err(format!("'{flag}' of true is served beside its '{bound}' alone: give it as a number"));
        }
    }
    Ok(())
}

/// Refuses a `minProperties` that names which come twice could make up for.
pub fn check_least(fields: &Map<String, Value>) -> Result<()> {
    let least = fields.get("minProperties").and_then(Value::as_u64).unwrap_or(0);
    let patterns =
        fields.get("patternProperties").and_then(Value::as_object).is_some_and(|patterns| !patterns.is_empty());
    let further = patterns || fields.get("additionalProperties") != Some(&Value::Bool(false));
    let required: HashSet<&str> =
        fields.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect();
    // Of one further name there is no second.
    let most = required.len() + 1;
    if admits(fields, "object") && further && least > most as u64 {
        return Err(format!(
            "'minProperties' {least} cannot be kept to: names beside the required ones may come twice, so that it may be up to {most}"
        ));
    }
    Ok(())
}
