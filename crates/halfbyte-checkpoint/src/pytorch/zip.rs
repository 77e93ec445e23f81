//! The directory of a zip archive, held against the headers of its entries. Only entries that are stored as they are.
//!
//! Own code rather than a crate: what is needed is the place of each entry in a file that is mapped already, in a form that
//! one program writes, and an archive that says two things at once has to be refused, which general readers do not do.

use super::shown;
use std::collections::HashMap;
use std::ops::Range;

const LOCAL: &[u8] = b"PK\x03\x04";
const CENTRAL: &[u8] = b"PK\x01\x02";
const END: &[u8] = b"PK\x05\x06";
const END_64: &[u8] = b"PK\x06\x06";
const LOCATOR_64: &[u8] = b"PK\x06\x07";

/// Lengths of these records without names, extras and comment.
const LOCAL_BYTES: usize = 30;
const CENTRAL_BYTES: usize = 46;
const END_BYTES: usize = 22;
const END_64_BYTES: usize = 56;
const LOCATOR_64_BYTES: usize = 20;

/// What a field of 32 bits holds where an extra one has its value.
const IN_EXTRA: u64 = 0xffff_ffff;

/// Bits of an entry's flags: it is encrypted; its sizes follow its data.
const ENCRYPTED: u64 = 1;
const SIZES_FOLLOW: u64 = 8;

type Parse<T> = Result<T, String>;

/// Whether a file begins as an archive with entries does.
pub(super) fn is_zip(file: &[u8]) -> bool {
    file.starts_with(LOCAL)
}

/// The entries of an archive: the place of each one's bytes.
///
/// Errors: no directory, or one that does not fit the file; an entry that is compressed, encrypted, there twice, outside of
/// the file or within another; a directory that says another thing than the entry itself.
pub(super) fn entries(file: &[u8]) -> Parse<HashMap<&str, Range<usize>>> {
    let Directory { range, count } = directory(file)?;
    let mut rest = &file[range.clone()];
    let mut entries = HashMap::new();
    let mut taken: Vec<(Range<usize>, &str)> = Vec::new();
    while !rest.is_empty() {
        let (entry, length) = central(rest)?;
        rest = &rest[length..];
        let name = entry.name;
        let data = local(file, &entry, range.start).map_err(|what| format!("entry `{}`: {what}", shown(name)))?;
        taken.push((entry.offset..data.end, name));
        if entries.insert(name, data).is_some() {
            return Err(format!("there are two entries `{}`", shown(name)));
        }
    }
    if entries.len() as u64 != count {
        return Err(format!("its directory announces {count} entries and has {}", entries.len()));
    }
    taken.sort_by_key(|(range, _)| (range.start, range.end));
    if let Some([(_, a), (_, b)]) = taken.array_windows().find(|[(a, _), (b, _)]| b.start < a.end) {
        return Err(format!("entries `{}` and `{}` share bytes", shown(a), shown(b)));
    }
    Ok(entries)
}

struct Directory {
    range: Range<usize>,
    count: u64,
}

/// Where the directory is, by the record at the end of the file, and by that of zip64 before it if there is one.
fn directory(file: &[u8]) -> Parse<Directory> {
    let last = file.len().checked_sub(END_BYTES).ok_or("the file is too short for a zip archive")?;
    let ends = |&at: &usize| {
        file[at..].starts_with(END) && field(file, at + 20, 2) == Some((file.len() - at - END_BYTES) as u64)
    };
    let Some(end) = (last.saturating_sub(0xffff)..=last).rev().find(ends) else {
        return Err("its zip directory is missing at the end; the file is truncated".into());
    };
    let at = |offset, width| field(file, end + offset, width).unwrap_or_default();
    let (mut count, mut size, mut start, mut before) = (at(10, 2), at(12, 4), at(16, 4), end);
    if at(4, 2) != 0 || at(6, 2) != 0 || at(8, 2) != count {
        return Err("it is one of several files of a zip archive".into());
    }
    if let Some(locator) = end.checked_sub(LOCATOR_64_BYTES).filter(|&at| file[at..].starts_with(LOCATOR_64)) {
        let offset = field(file, locator + 8, 8).unwrap_or_default();
        // The only one that is written; a longer record has fields that nothing here knows.
        let record = locator.checked_sub(END_64_BYTES).filter(|&at| at as u64 == offset);
        let Some(record) = record.filter(|&at| file[at..].starts_with(END_64)) else {
            return Err("its zip64 record is not where its locator says".into());
        };
        let wide = |offset| field(file, record + offset, 8).unwrap_or_default();
        for (narrow, wide, all_ones) in
            [(count, wide(32), 0xffff), (size, wide(40), IN_EXTRA), (start, wide(48), IN_EXTRA)]
        {
            if narrow != wide && narrow != all_ones {
                return Err(format!("its two zip directories contradict each other: {narrow} and {wide}"));
            }
        }
        (count, size, start, before) = (wide(32), wide(40), wide(48), record);
    }
    match start.checked_add(size) {
        Some(end) if end == before as u64 => Ok(Directory { range: start as usize..before, count }),
        _ => Err(format!(
            "expected its zip directory to end at byte {before}, where the end record begins, got {size} bytes from {start} on"
        )),
    }
}

/// An entry as the directory has it.
struct Central<'a> {
    name: &'a str,
    flags: u64,
    size: u64,
    /// Where its own header is.
    offset: usize,
}

/// The first entry of these bytes, and the bytes that it takes.
fn central(bytes: &[u8]) -> Parse<(Central<'_>, usize)> {
    let cut = || "its zip directory is cut off".to_owned();
    if !bytes.starts_with(CENTRAL) || bytes.len() < CENTRAL_BYTES {
        return Err("its zip directory holds something else than entries".into());
    }
    let at = |offset, width| field(bytes, offset, width).unwrap_or_default();
    let lengths = [at(28, 2), at(30, 2), at(32, 2)].map(|length| length as usize);
    let (name_end, extra_end) = (CENTRAL_BYTES + lengths[0], CENTRAL_BYTES + lengths[0] + lengths[1]);
    let name = bytes.get(CENTRAL_BYTES..name_end).ok_or_else(cut)?;
    let extra = bytes.get(name_end..extra_end).ok_or_else(cut)?;
    let length = extra_end + lengths[2];
    bytes.get(..length).ok_or_else(cut)?;
    let name = str::from_utf8(name).map_err(|_| "an entry's name is not UTF-8".to_owned())?;
    let fail = |what: &str| Err(format!("entry `{}` {what}", shown(name)));
    let (flags, method) = (at(8, 2), at(10, 2));
    match method {
        0 => {}
        8 => return fail("is compressed (deflate); PyTorch stores its entries as they are"),
        _ => return fail("is compressed; PyTorch stores its entries as they are"),
    }
    if flags & ENCRYPTED != 0 {
        return fail("is encrypted");
    }
    // Whichever of them do not fit 32 bits are in the extra field, in this order.
    let mut wide = zip64(extra);
    let mut value = |narrow: u64| if narrow == IN_EXTRA { wide.next() } else { Some(narrow) };
    let (Some(size), Some(packed), Some(offset)) = (value(at(24, 4)), value(at(20, 4)), value(at(42, 4))) else {
        return fail("has no zip64 field for a size beyond 32 bits");
    };
    if size != packed {
        return fail("has two sizes, though it is stored as it is");
    }
    match usize::try_from(offset) {
        Ok(offset) => Ok((Central { name, flags, size, offset }, length)),
        Err(_) => fail("lies outside of the file"),
    }
}

/// The place of an entry's bytes, by its own header, which has to say what the directory says. Data ends before `end`.
fn local(file: &[u8], entry: &Central<'_>, end: usize) -> Parse<Range<usize>> {
    let outside = || format!("its header at byte {} lies outside of the file's data", entry.offset);
    let header = file.get(entry.offset..end).filter(|h| h.len() >= LOCAL_BYTES).ok_or_else(outside)?;
    if !header.starts_with(LOCAL) {
        return Err(format!("there is no header at byte {}", entry.offset));
    }
    let at = |offset, width| field(header, offset, width).unwrap_or_default();
    let name_end = LOCAL_BYTES + at(26, 2) as usize;
    let data = name_end + at(28, 2) as usize;
    let (Some(name), Some(extra)) = (header.get(LOCAL_BYTES..name_end), header.get(name_end..data)) else {
        return Err(outside());
    };
    let says = |what: &str| Err(format!("its own header and the directory have two {what}"));
    if name != entry.name.as_bytes() {
        return says("names");
    }
    if at(6, 2) != entry.flags {
        return says("sets of flags");
    }
    if at(8, 2) != 0 {
        return says("methods");
    }
    let mut wide = zip64(extra);
    for narrow in [at(22, 4), at(18, 4)] {
        let size = if narrow == IN_EXTRA { wide.next() } else { Some(narrow) };
        let follows = entry.flags & SIZES_FOLLOW != 0 && size == Some(0);
        if size != Some(entry.size) && !follows {
            return says("sizes");
        }
    }
    let start = entry.offset + data;
    match usize::try_from(entry.size).ok().and_then(|size| start.checked_add(size)) {
        Some(data_end) if data_end <= end => Ok(start..data_end),
        _ => Err(format!("its {} bytes reach beyond the file's data", entry.size)),
    }
}

/// The values of 64 bits in an extra field.
fn zip64(mut extra: &[u8]) -> impl Iterator<Item = u64> {
    let mut values: &[u8] = &[];
    while let (Some(id), Some(length)) = (field(extra, 0, 2), field(extra, 2, 2)) {
        let Some((this, rest)) = extra[4..].split_at_checked(length as usize) else { break };
        if id == 1 {
            values = this;
            break;
        }
        extra = rest;
    }
    values.as_chunks::<8>().0.iter().map(|&value| u64::from_le_bytes(value))
}

/// The little-endian number of so many bytes at an offset.
fn field(bytes: &[u8], at: usize, width: usize) -> Option<u64> {
    let bytes = bytes.get(at..)?.get(..width)?;
    Some(bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte)))
}
