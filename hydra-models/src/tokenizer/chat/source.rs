//! Instruments the source of a chat template so that rendering reports where messages are in the text.
//!
//! Tags are found with the rules of Jinja's lexer: comments, raw blocks and strings are skipped. `{% generation %}`, a
//! tag specific to Transformers, becomes a call block of [`GENERATION`], and each loop calls [`ENTER`] with its
//! variable and the loop's number. Neither changes the rendered text.

/// The function called with the content of a `{% generation %}` block.
pub(super) const GENERATION: &str = "_hydra_generation";
/// The function called with the variable of each loop and the loop's number.
pub(super) const ENTER: &str = "_hydra_enter";

/// A template's source.
pub(super) struct Source {
    pub(super) text: String,
    /// Whether it has `{% generation %}` blocks.
    pub(super) marked: bool,
}

/// Instruments a template. Line endings become newlines, as in Jinja.
pub(super) fn instrument(text: &str) -> Source {
    let text = text.replace("\r\n", "\n").replace('\r', "\n");
    let captured = captures(&text);
    let mut out = String::with_capacity(text.len());
    let (mut rest, mut marked, mut loops, mut raw) = (text.as_str(), false, 0, false);
    while let Some(tag) = next_tag(rest) {
        out.push_str(&rest[..tag.start]);
        let whole = &rest[tag.start..tag.end];
        rest = &rest[tag.end..];
        let Some(block) = whole.strip_prefix("{%").filter(|_| !raw || is_block(whole, "endraw")) else {
            out.push_str(whole);
            continue;
        };
        let block = block.strip_suffix("%}").unwrap_or(block);
        let [before, after] = controls(block);
        match words(block).as_slice() {
            ["generation"] => {
                marked = true;
                out.push_str(&format!("{{%{before} call {GENERATION}() {after}%}}"));
                if !captured.is_empty() {
                    out.push_str(&format!("{{% set _hydra = [{}] {after}%}}", captured.join(", ")));
                }
            }
            ["endgeneration"] => out.push_str(&format!("{{%{before} endcall {after}%}}")),
            ["for", variable, "in", ..] if is_name(variable) => {
                // The inserted tag takes over the original tag's white space control at its end.
                out.push_str(&format!("{whole}{{% set _hydra = {ENTER}({variable}, {loops}) {after}%}}"));
                loops += 1;
            }
            [name, ..] => {
                raw = *name == "raw";
                out.push_str(whole);
            }
            [] => out.push_str(whole),
        }
    }
    out.push_str(rest);
    Source { text: out, marked }
}

/// The variables that have attributes set by some tag. A call block captures only the variables that it reads, so the
/// content of a `{% generation %}` block has to read them before it sets their attributes.
fn captures(text: &str) -> Vec<&str> {
    let (mut rest, mut names) = (text, Vec::new());
    while let Some(tag) = next_tag(rest) {
        let block = rest[tag.start..tag.end].strip_prefix("{%").map(words).unwrap_or_default();
        if let ["set", target, ..] = block.as_slice()
            && let Some((name, _)) = target.split_once('.').filter(|(name, _)| is_name(name))
            && !names.contains(&name)
        {
            names.push(name);
        }
        rest = &rest[tag.end..];
    }
    names
}

/// The white space control characters at both ends of a block tag.
fn controls(block: &str) -> [&'static str; 2] {
    let control = |sign: Option<u8>| match sign {
        Some(b'-') => "-",
        Some(b'+') => "+",
        _ => "",
    };
    [control(block.bytes().next()), control(block.bytes().last())]
}

fn words(block: &str) -> Vec<&str> {
    block.trim_matches(['-', '+']).split_whitespace().collect()
}

fn is_block(tag: &str, name: &str) -> bool {
    let inner = tag.strip_prefix("{%").and_then(|tag| tag.strip_suffix("%}"));
    inner.is_some_and(|inner| words(inner) == [name])
}

fn is_name(word: &str) -> bool {
    word.chars().all(|c| c == '_' || c.is_alphanumeric())
}

struct Tag {
    start: usize,
    end: usize,
}

/// Finds the next tag or comment, up to its end.
fn next_tag(text: &str) -> Option<Tag> {
    let opening = |(at, _): &(usize, char)| {
        text[*at..].starts_with("{%") || text[*at..].starts_with("{{") || text[*at..].starts_with("{#")
    };
    let (start, _) = text.char_indices().find(opening)?;
    let inner = start + 2;
    let end = match &text[start..inner] {
        "{#" => text[inner..].find("#}").map(|at| inner + at + 2),
        "{%" => end_of(text, inner, "%}"),
        _ => end_of(text, inner, "}}"),
    }?;
    Some(Tag { start, end })
}

/// The position after the delimiter that ends a tag, outside of strings and brackets.
fn end_of(text: &str, from: usize, sign: &str) -> Option<usize> {
    let (mut open, mut quote, mut escaped) = (0_usize, None, false);
    for (at, c) in text[from..].char_indices() {
        match (quote, c) {
            (Some(_), _) if escaped => escaped = false,
            (Some(_), '\\') => escaped = true,
            (Some(q), c) if c == q => quote = None,
            (Some(_), _) => {}
            (None, '"' | '\'') => quote = Some(c),
            (None, _) if open == 0 && text[from + at..].starts_with(sign) => {
                return Some(from + at + sign.len());
            }
            (None, '(' | '[' | '{') => open += 1,
            (None, ')' | ']' | '}') => open = open.saturating_sub(1),
            (None, _) => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_marks_become_calls_with_the_same_white_space_control() {
        let source = instrument("a {%- generation %}x{% endgeneration -%} b\r\n{# {% generation %} #}");
        assert_eq!(source.text, "a {%- call _hydra_generation() %}x{% endcall -%} b\n{# {% generation %} #}");
        assert!(source.marked);
    }

    #[test]
    fn what_stands_in_marks_reads_what_it_sets_attributes_of() {
        let source = instrument("{% set ns.a = 1 %}{%- generation -%}{%- set ns.b=2 %}{% endgeneration %}");
        assert_eq!(
            source.text,
            "{% set ns.a = 1 %}{%- call _hydra_generation() -%}{% set _hydra = [ns] -%}{%- set ns.b=2 %}{% endcall %}"
        );
    }

    #[test]
    fn loops_report_their_variable() {
        let source =
            instrument("{% for m in messages -%}\n{%- for k, v in m.items() %}{% endfor %}{% endfor %}");
        assert_eq!(
            source.text,
            "{% for m in messages -%}{% set _hydra = _hydra_enter(m, 0) -%}\n\
             {%- for k, v in m.items() %}{% endfor %}{% endfor %}"
        );
        assert!(!source.marked);
    }

    #[test]
    fn strings_raw_blocks_and_comments_are_left_alone() {
        for text in [
            "{{ '{% generation %}' }}{{ \"it's {% for m in x %}\" }}{{ {'a': {'b': 1}} }}",
            "{% raw %}{% generation %}{% for m in x %}{% endraw %}{{ x }}",
            "{#- {% generation %} -#}{% if '%}{% generation %}' in x %}{% endif %}",
            "a { b %} } c {{ 'never ends",
        ] {
            let source = instrument(text);
            assert_eq!((source.text.as_str(), source.marked), (text, false));
        }
    }
}
