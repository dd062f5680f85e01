"""Registry of error codes: the cause and the remedy of every code that errors, warnings and rejected rows carry.

An error is identified by its code and its config keys. Codes are stable. Messages may be reworded at any time.
`scripts/error_page.py` writes this registry to docs/errors.md.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ErrorCode:
    """One sentence on the cause of an error and one on the remedy."""

    cause: str
    remedy: str


_CONFIG = {
    "invalid_config": ErrorCode(
        "A rule of custom code rejects the config without a code of its own.",
        "Read the message, or pass `code=` where your class raises the error.",
    ),
    "several_errors": ErrorCode(
        "The config has several errors.", "Look up the code in brackets on each line of the list."
    ),
    "unknown_key": ErrorCode(
        "A config key does not exist.", "Use the suggested key, or list all keys with `automodel options`."
    ),
    "missing_key": ErrorCode("A required value is not set.", "Set the key that the message names."),
    "wrong_type": ErrorCode(
        "A value has another type than its key or argument accepts.", "Set a value of the expected type."
    ),
    "invalid_choice": ErrorCode("A value is not one of the allowed choices.", "Set one of the listed choices."),
    "unknown_name": ErrorCode(
        "A name in a list or an argument matches nothing that exists.", "Use one of the listed names."
    ),
    "out_of_range": ErrorCode("A number is below its minimum or above its maximum.", "Set a number in the range."),
    "invalid_value": ErrorCode(
        "A value has the right type but the wrong form, for example a malformed URL or regular expression.",
        "Write the value in the form that the message describes.",
    ),
    "empty_value": ErrorCode("A list, mapping or text has no entries.", "Add at least one entry, or remove the key."),
    "ambiguous": ErrorCode("A value matches several things.", "Name one of them explicitly."),
    "mutually_exclusive": ErrorCode("Two settings or options cannot be set together.", "Keep one of them."),
    "requires_setting": ErrorCode(
        "A setting or option works only with another one, which is not set.", "Set the other one too, or remove this."
    ),
    "no_effect": ErrorCode(
        "A setting has no effect because of another setting.", "Remove it, or change the other setting."
    ),
    "unsupported_combination": ErrorCode(
        "Two settings are supported separately but not together.", "Change one of the two settings."
    ),
    "not_supported": ErrorCode("A value is valid but not implemented.", "Use the suggested alternative."),
    "not_divisible": ErrorCode(
        "A number is not a multiple of another number.", "Change one of the two numbers so that it divides the other."
    ),
    "sequence_length": ErrorCode(
        "A document or response is longer than its sequence, or a sequence exceeds the limit of the model.",
        "Change `data.seq_len`, `data.truncation` or the number of generated tokens.",
    ),
    "nothing_to_train": ErrorCode(
        "No parameter or no loss term is left to train.", "Enable a loss term or make parameters trainable."
    ),
    "limit_exceeded": ErrorCode(
        "A config, file or sweep exceeds a safety limit of size, depth or count.", "Make it smaller."
    ),
}

_FILES_AND_TARGETS = {
    "invalid_yaml": ErrorCode(
        "A config file is not valid YAML, not a mapping, or its defaults list cannot be composed.",
        "Correct the line that is named.",
    ),
    "invalid_override": ErrorCode(
        "A command-line override cannot be read or applied.", "Write it as `key=value` and quote special characters."
    ),
    "invalid_interpolation": ErrorCode(
        "An interpolation `${...}` cannot be resolved.", "Correct the key or resolver inside the braces."
    ),
    "no_recipe": ErrorCode(
        "The config selects no recipe, or was written for another tool.",
        "Begin the file with `defaults: [sft, _self_]`, or translate it with `automodel import-config`.",
    ),
    "wrong_recipe": ErrorCode(
        "The command needs a config or a run of another kind.", "Use the command that fits, or another config."
    ),
    "invalid_target": ErrorCode(
        "A `_target_` does not exist, or is not a class that a config can build.",
        "Correct the dotted name, or wrap the function in a config class.",
    ),
    "import_failed": ErrorCode("A module raised an error while it was imported.", "Correct the module."),
    "invalid_arguments": ErrorCode(
        "A class or library rejects its arguments.", "Correct the arguments as the library's error describes."
    ),
    "untrusted_code": ErrorCode(
        "The config or model would run code from a package or repository that is not trusted.",
        "Trust it explicitly if you know the code, for example with `--trust-package`.",
    ),
    "unsafe_file": ErrorCode(
        "A file could run code when read, or is a link or device where a regular file is expected.",
        "Replace the file, or move the folder.",
    ),
    "unsupported_file_type": ErrorCode("Files of this type are not supported.", "Convert or rename the file."),
    "missing_file": ErrorCode("A file or folder does not exist.", "Correct the path."),
    "unreadable_file": ErrorCode("A file exists but cannot be read.", "Check its permissions and its disk."),
    "damaged_file": ErrorCode(
        "The contents of a file are not valid, for example because it is truncated.", "Repair or replace the file."
    ),
    "file_exists": ErrorCode("The output file exists already.", "Choose another name, or delete the file."),
    "unwritable_file": ErrorCode("A file or folder cannot be written.", "Check the path and its permissions."),
    "disk_full": ErrorCode("The disk or quota is full.", "Free disk space, or write to another disk."),
    "not_shared": ErrorCode("A folder is not the same folder on all nodes.", "Use a file system that all nodes share."),
}

_COMMANDS = {
    "unknown_command": ErrorCode("No command has this name.", "List the commands with `automodel --help`."),
    "unknown_option": ErrorCode("The command has no such option.", "List its options with `--help`."),
    "usage": ErrorCode(
        "An argument is missing, or an option has a missing or invalid value.",
        "Print the arguments and options with `--help` after the command.",
    ),
    "nothing_to_compare": ErrorCode(
        "The two sides of a comparison are identical or share no items.", "Compare two different runs or configs."
    ),
    "run_not_found": ErrorCode("No run has this name or path.", "List the runs with `automodel runs ls`."),
    "run_locked": ErrorCode("Another process is training in this run folder.", "Wait for it, or stop it first."),
    "no_checkpoint": ErrorCode("The run has no such checkpoint.", "Choose another step, or train until one is saved."),
    "no_export": ErrorCode("The run has no exported model.", "Export it with `automodel export`."),
    "resume_conflict": ErrorCode(
        "The run cannot resume from here, because a newer or a different state exists.",
        "Resume from the newest checkpoint, or start a new run.",
    ),
    "checkpoint_mismatch": ErrorCode(
        "A checkpoint was written with another model, optimizer, setting or dataset.",
        "Restore the original settings and data, or start a new run.",
    ),
    "checkpoint_incomplete": ErrorCode("A checkpoint is incomplete or damaged.", "Resume from an earlier checkpoint."),
    "export_mismatch": ErrorCode(
        "The exported model does not compute the same log-probs as the trained model.",
        "Keep the checkpoint and report the model family.",
    ),
}

_MODELS = {
    "model_not_found": ErrorCode(
        "A model or tokenizer cannot be found or loaded.", "Check the path or hub id, and your access to it."
    ),
    "not_supported_by_model": ErrorCode(
        "The model family does not support the feature.", "Disable the feature, or use another model."
    ),
    "not_measured": ErrorCode(
        "Support could not be determined, because a small copy of the model does not run.", "Disable the feature."
    ),
    "wrong_model_kind": ErrorCode(
        "A language model is needed but a classifier was given, or the reverse.", "Use a model of the right kind."
    ),
    "weights_mismatch": ErrorCode(
        "The weights in a file or update do not match the parameters of the model.",
        "Use weights that belong to this model config.",
    ),
    "vocabulary_mismatch": ErrorCode(
        "Token ids of a tokenizer, model or server do not agree.", "Use a tokenizer that belongs to the model."
    ),
    "invalid_template": ErrorCode(
        "A chat template is missing, or cannot render the conversation as training needs it.",
        "Set another `data.chat_template`.",
    ),
    "mesh_size": ErrorCode(
        "The sizes of the device mesh do not match the number of ranks or GPUs.",
        "Change a size of `mesh`, or start another number of ranks.",
    ),
    "stage_count": ErrorCode(
        "The number of pipeline stages does not fit the layers, the ranks or the schedule.",
        "Change `mesh.pp_size` or `pipeline.layers_per_stage`.",
    ),
    "invalid_schedule": ErrorCode(
        "A pipeline schedule is incomplete, deadlocks or repeats an action.", "Correct the CSV file."
    ),
    "does_not_fit": ErrorCode(
        "The estimated memory exceeds the memory of the device.", "Apply one of the suggested changes."
    ),
}

_MACHINE = {
    "missing_package": ErrorCode("An optional Python package is not installed.", "Install the package."),
    "version_mismatch": ErrorCode("A package or server has an unsupported version.", "Install a supported version."),
    "hardware_required": ErrorCode(
        "The feature needs a device that this machine does not have.", "Disable it, or use another machine."
    ),
    "kernel_unavailable": ErrorCode(
        "A kernel cannot run or compile here.", "Use `auto` to choose a kernel that works, or disable the feature."
    ),
    "invalid_environment": ErrorCode(
        "An environment variable is missing or contradicts the config.", "Set or unset the variable."
    ),
    "not_isolated": ErrorCode(
        "The machine cannot isolate generated code.", "Install the sandbox, or allow unisolated code explicitly."
    ),
    "submission_failed": ErrorCode("A job scheduler is missing or rejects the job.", "Correct the job options."),
    "command_failed": ErrorCode("An external program ended with an error.", "Read the end of its output."),
}

_RUNS = {
    "run_failed": ErrorCode("A training step or custom code failed.", "Read the error in the message."),
    "dry_run_failed": ErrorCode(
        "The dry run itself failed. The run may still work.", "Use `automodel plan`, and report the failure."
    ),
    "picture_changed": ErrorCode(
        "A picture file was edited, moved or deleted after the data was prepared.",
        "Restore the file, or start a new run.",
    ),
    "non_finite": ErrorCode(
        "The loss or the gradient norm is inf or NaN.", "Inspect the listed rows, or lower the learning rate."
    ),
    "out_of_memory": ErrorCode("A GPU or the host ran out of memory.", "Apply one of the suggested changes."),
    "rank_failure": ErrorCode("A rank was killed or lost its connection.", "Read the log of the rank, then resume."),
    "rendezvous_failed": ErrorCode(
        "The ranks cannot connect to each other.", "Check MASTER_ADDR, MASTER_PORT and the network interface."
    ),
    "timeout": ErrorCode("An operation took longer than its time limit.", "Raise the limit, or look for a hang."),
    "interrupted": ErrorCode("A signal ended the run before it trained.", "Start it again."),
    "callback_failed": ErrorCode(
        "A callback or experiment tracker raised an error or returned an invalid value.", "Correct or remove it."
    ),
    "estimator_failed": ErrorCode(
        "A custom advantage estimator raised an error or returned a wrong result.", "Correct the estimator."
    ),
    "reward_failed": ErrorCode("A reward raised an error.", "Correct the reward function."),
    "environment_failed": ErrorCode(
        "An environment or tool server raised an error or returned an invalid conversation.", "Correct it."
    ),
    "server_unreachable": ErrorCode(
        "A server, a hub or an object store does not respond.", "Check that it runs and that its URL is right."
    ),
    "server_rejected": ErrorCode(
        "A server, a hub or an object store rejects a request.", "Read the reason in the message."
    ),
    "server_failed": ErrorCode("A server that the run started ended or did not start.", "Read the end of its log."),
    "server_mismatch": ErrorCode(
        "A server lacks a needed feature, or serves another model.", "Start the server with the needed options."
    ),
    "invalid_response": ErrorCode(
        "A server or engine returned an incomplete or contradictory response.", "Check the version of the server."
    ),
    "weight_update_failed": ErrorCode(
        "New weights did not reach a generation server.", "Check the server, then resume."
    ),
    "logprob_mismatch": ErrorCode(
        "The log-probs of the generation engine differ from those of the trainer.",
        "Check that the server serves the same model and returns unmodified log-probs.",
    ),
}

_WARNINGS = {
    "fusion_lost": ErrorCode(
        "Kernels that fuse parts of this family do not find them with the installed transformers.",
        "Install a tested release (`automodel doctor`), or continue: results are equal, and steps take longer.",
    ),
    "recompilation": ErrorCode(
        "A step compiled again.", "Keep shapes constant, or set `parallelizer.enable_compile=false`."
    ),
    "precision_loss": ErrorCode(
        "Some layers compute or send values in another precision than configured.",
        "Change the setting that the warning names.",
    ),
    "crosses_nodes": ErrorCode(
        "Ranks that exchange data in every layer are on several nodes.",
        "Choose a group size that divides the GPUs of a node, or continue: results are equal, and steps take longer.",
    ),
    "high_memory_use": ErrorCode("An operation needs much memory.", "Use shorter sequences or another kernel."),
    "repeated_rows": ErrorCode(
        "A step needs more sequences than an epoch has. Packing makes fewer sequences than the data has rows.",
        "Lower the batch size (`train.global_batch_size` or `rollout.prompts_per_step`), or add data.",
    ),
    "implied_setting": ErrorCode("A setting enabled another setting.", "Set it yourself to avoid the warning."),
    "known_tokens": ErrorCode(
        "Tokens that should be added are in the tokenizer already.", "Nothing needs to be done, or correct their text."
    ),
    "new_score_layer": ErrorCode(
        "The checkpoint is a classifier, but its score layer is not used. The new one starts at zero.",
        "Set `objective.labels` to the labels of the checkpoint to train its score layer further, or continue.",
    ),
    "other_embedding_settings": ErrorCode(
        "The checkpoint is an embedding model that was trained with another pooling or other prompts.",
        "Set the keys to the printed values, or continue if the change is wanted.",
    ),
    "server_restored": ErrorCode("A generation server responds again.", "Nothing needs to be done."),
}

_DATA = {
    "invalid_data": ErrorCode("Custom code rejects the data without a code of its own.", "Read the message."),
    "bad_rows": ErrorCode(
        "Rows cannot be used. The message groups them by cause.",
        "Correct the rows, or skip them with `data.on_invalid_row=drop`.",
    ),
    "not_enough_rows": ErrorCode(
        "No rows, or fewer rows than requested, are left.", "Add data, or lower the requested number."
    ),
    "preparation_stopped": ErrorCode(
        "A run with `data.start_after` waits for a shard that no process prepares.",
        "Start `automodel data prepare` with the same config, then start or resume the run.",
    ),
    "unknown_format": ErrorCode(
        "The columns match no data format.", "Set `data.format` or map the columns with `data.column_mapping`."
    ),
    "wrong_data_kind": ErrorCode(
        "The recipe or objective trains on another kind of data.", "Use matching data, or another recipe."
    ),
    "batch_shape": ErrorCode(
        "The tensors of a batch do not agree in length or number.", "Correct the code that builds the batch."
    ),
}

ROW_CODES = {
    "template_error": ErrorCode("The chat template raises an error for the row.", "Correct the row or the template."),
    "no_label_token": ErrorCode(
        "No token of the row would be trained.", "Add an assistant message, or change the mask."
    ),
    "generation_blocks": ErrorCode(
        "The generation blocks of the template do not match the assistant messages.", "Correct the template."
    ),
    "not_a_prefix": ErrorCode(
        "The template renders earlier messages differently once later messages follow.",
        "Set `data.multi_turn=per_turn`.",
    ),
    "no_stop": ErrorCode("The template writes no token that ends a message.", "Set another chat template."),
    "other_template": ErrorCode(
        "The tokenizer's template and the training template render the first turn differently.",
        "Set `data.chat_template=tokenizer`.",
    ),
    "bad_history": ErrorCode("`history` is not a list of text pairs.", "Correct the row."),
    "no_template": ErrorCode("The row needs a chat template and there is none.", "Set `data.chat_template`."),
    "template_without_tools": ErrorCode("The chat template cannot show tools.", "Set another chat template."),
    "tools_ignored": ErrorCode("The chat template does not render the tools.", "Set another chat template."),
    "dropped_by_template": ErrorCode(
        "The chat template does not render a part of the row.", "Set another chat template."
    ),
    "bad_role": ErrorCode("A message has a role that is unknown or not allowed there.", "Correct the role."),
    "no_role": ErrorCode("A message has no role.", "Add `role`."),
    "bad_train": ErrorCode("`train` is not a boolean, or not on an assistant message.", "Correct the row."),
    "missing_column": ErrorCode("The row lacks a column.", "Add the column, or map it with `data.column_mapping`."),
    "not_json": ErrorCode("The line is not valid JSON.", "Write one JSON object per line."),
    "lone_surrogate": ErrorCode("A text contains half of a surrogate pair.", "Correct the encoding of the text."),
    "too_deep": ErrorCode("Lists and objects are nested too deeply.", "Flatten the row."),
    "long_number": ErrorCode("An integer has too many digits.", "Write it as text."),
    "not_utf8": ErrorCode("The row is not valid UTF-8.", "Convert the file to UTF-8."),
    "not_an_object": ErrorCode("The row is not an object with columns.", "Write each row as a JSON object."),
    "csv": ErrorCode("The record is not valid CSV.", "Correct the quotes of the record."),
    "cells": ErrorCode("The record has more or fewer cells than the header.", "Correct the record."),
    "two_systems": ErrorCode("The row has two system messages.", "Remove one."),
    "two_tools": ErrorCode("Both the row and its environment define tools.", "Remove one of the definitions."),
    "empty": ErrorCode("A text or list of the row is empty.", "Fill it, or remove the row."),
    "not_messages": ErrorCode("The column is not a list of messages.", "Correct the row."),
    "not_text": ErrorCode("A value is not text.", "Write it as text."),
    "bad_label": ErrorCode(
        "The label has another type than the recipe trains on: true or false, a name, a list of names or a number.",
        "Correct the label.",
    ),
    "unknown_label": ErrorCode(
        "The label of a row is not in `objective.labels`.", "Correct the label, or add it to `objective.labels`."
    ),
    "label_out_of_range": ErrorCode(
        "The label of a row is an index beyond the last name of `objective.labels`.",
        "Write a name for every class in `objective.labels`.",
    ),
    "ends_with_padding": ErrorCode(
        "A text ends with the padding token, so transformers would read the score at an earlier token.",
        "Remove the token at the end of the text.",
    ),
    "bad_margin": ErrorCode("The margin is not a finite number.", "Correct the margin."),
    "no_prompt": ErrorCode("The row has no prompt.", "Add a prompt."),
    "bad_prompt": ErrorCode("The prompt is not the shared beginning of both responses.", "Correct the prompt."),
    "same_responses": ErrorCode("The chosen and rejected responses are not distinct.", "Remove the row."),
    "bad_tools": ErrorCode("The tools are not a list of descriptions.", "Correct the column."),
    "bad_tool_call": ErrorCode("A tool call is malformed.", "Write a name and an object of arguments."),
    "no_tool_call_id": ErrorCode("A tool result does not name its call.", "Add `tool_call_id`."),
    "special_token": ErrorCode(
        "The text contains a special token.", "Set `data.special_tokens_policy`, or remove the token."
    ),
    "several_turns": ErrorCode("A preference row has several trained turns.", "Keep one response per side."),
    "format_error": ErrorCode("A custom format raised an error or returned a wrong type.", "Correct the format."),
    "unlisted_field": ErrorCode("A custom format reads a field that it does not declare.", "Add it to `fields`."),
    "unread_key": ErrorCode("No code or template reads a key of the message.", "Remove the key."),
    "unread_column": ErrorCode("The format does not read a column.", "Remove the column or set `data.column_mapping`."),
    "no_picture": ErrorCode("A picture does not exist.", "Correct its path, or set `data.media_dir`."),
    "no_picture_format": ErrorCode("A file is no picture, or has no known format.", "Replace the file."),
    "bad_picture": ErrorCode("A picture is damaged.", "Replace the file."),
    "huge_picture": ErrorCode("A picture has too many pixels or bytes.", "Resize it, or set `data.max_image_pixels`."),
    "picture_url": ErrorCode("A picture is a web address.", "Download it, and write its path."),
    "image_count": ErrorCode("Image tags and pictures differ in number.", "Give each tag one picture."),
    "picture_in_answer": ErrorCode("A trained message has a picture.", "Set `train: false`, or move the picture."),
    "bad_text": ErrorCode("The text contains private-use characters that mark pictures.", "Remove them."),
}
"""Codes of rejected rows, which `rejected.jsonl` and errors with the code `bad_rows` contain."""

LAYOUT_CODES = {
    "stray-close": ErrorCode("`)` closes no group.", "Remove it."),
    "unclosed-group": ErrorCode("`(` is never closed.", "Add `)`."),
    "nested-group": ErrorCode("A group contains a group.", "Write the inner group out."),
    "empty-group": ErrorCode("A group is empty.", "Fill or remove it."),
    "missing-count": ErrorCode("A group has no count.", "Write `*` and a number after `)`."),
    "bad-count": ErrorCode("`*` is not followed by a number.", "Write a number after `*`."),
    "chained-star": ErrorCode("One unit has two counts.", "Multiply the two numbers."),
    "dangling-star": ErrorCode("`*` repeats nothing.", "Write a letter before `*`."),
    "stray-digit": ErrorCode("A number does not follow `*`.", "Remove it, or write `*` before it."),
    "bad-character": ErrorCode("A character is not part of the layout language.", "Remove it."),
    "bad-item-type": ErrorCode("An item or stage has the wrong type.", "Write lists of layer names."),
    "unknown-layer": ErrorCode("A layer name is unknown.", "Use one of the listed names."),
    "too-long": ErrorCode("The layout expands to too many items.", "Lower its counts."),
    "bad-pp": ErrorCode("`pp_size` is below 1.", "Set at least 1."),
    "stage-count": ErrorCode("The number of stages is not a multiple of `pp_size`.", "Add or remove stages."),
    "layer-count": ErrorCode("The layout does not place all decoder layers.", "Correct the number of `t`."),
    "mtp-count": ErrorCode(
        "The layout does not place all multi-token-prediction layers.", "Correct the number of `m`."
    ),
    "no-embedding": ErrorCode("The layout has no embedding.", "Begin the first stage with `E`."),
    "no-loss": ErrorCode("The layout has no loss.", "End the last stage with `L`."),
    "duplicate-embedding": ErrorCode("The layout has two embeddings.", "Keep the first `E`."),
    "duplicate-loss": ErrorCode("The layout has two losses.", "Keep the last `L`."),
    "embedding-not-first": ErrorCode("The embedding is not the first item.", "Begin the first stage with `E`."),
    "loss-not-last": ErrorCode("The loss is not the last item.", "End the last stage with `L`."),
    "decoder-after-mtp": ErrorCode(
        "A decoder layer follows a multi-token-prediction layer.", "Move `m` behind all `t`."
    ),
    "mtp-split": ErrorCode("Multi-token-prediction layers are in several stages.", "Put all `m` into one stage."),
    "mtp-not-last-chunk": ErrorCode("`m` is not in the last chunk of its rank.", "Move `m` to a later stage."),
    "mtp-on-first-rank": ErrorCode("`m` is on the rank of the embedding.", "Move `m` to another rank."),
    "not-divisible": ErrorCode("The layers do not divide over ranks and chunks.", "Change one of the numbers."),
    "not-positive": ErrorCode("A number must be at least 1.", "Raise it."),
    "middle-mismatch": ErrorCode("The other ranks get no or too few layers.", "Change the counts of the end stages."),
    "vpp-conflict": ErrorCode("`vpp_size` contradicts the layout.", "Remove `vpp_size`."),
    "exclusive-options": ErrorCode("Two placement options exclude each other.", "Keep one."),
}
"""Codes of pipeline layout strings and placements."""

CODES = {**_CONFIG, **_FILES_AND_TARGETS, **_COMMANDS, **_MODELS, **_MACHINE, **_RUNS, **_DATA, **_WARNINGS}
"""Codes of errors and warnings."""

ALL_CODES = {**CODES, **ROW_CODES, **LAYOUT_CODES}
